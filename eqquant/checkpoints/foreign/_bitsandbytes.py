"""bitsandbytes weights in safetensors: NF4, FP4 and LLM.int8().

A 4-bit weight is a tensor of bytes with two codes per byte, the first in the high half.
Blocks run over the flattened weight, row after row. Separate tensors hold the absmax of
each block (which may be quantized), the table of levels, and JSON with the other
settings. An 8-bit weight has the absmax of each row in `SCB`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import Int8, NF4
from ..files import parse_object, Source, Tensor
from ._entry import Entry, from_levels, NotExact
from ._parts import find_parts, Parts


_library = "bitsandbytes"
STATE = ".quant_state.bitsandbytes__"
# The block sizes that bitsandbytes writes.
BLOCK_SIZES = tuple(2**i for i in range(5, 13))
DTYPES = {
    name: np.dtype(getattr(jnp, name)) for name in ("float32", "float16", "bfloat16")
}
# Smaller blocks would take more scales than weights.
_smallest_block = 8
_longest_state = 2**16
_storage_dtypes = ("uint8", "int8", "float16", "bfloat16", "float32")


def bitsandbytes_entries(source: Source) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name in source.tensors:
        weight, found, kind = name.partition(STATE)
        if found:
            if weight in entries:
                raise ValueError(
                    f"{source.path}: {weight!r} has two quant_state tensors."
                )
            entries[weight] = _State(source, weight, kind).entry()
    for parts in find_parts(source, "SCB", _library):
        entries[parts.weight] = _int8_entry(parts)
    return entries


#
# 4-bit weights
#


class _State:
    """The checked quantization state of a 4-bit weight."""

    def __init__(self, source: Source, weight: str, kind: str):
        self.parts = parts = Parts(source, "", _library, weight)
        self.weight, self.kind = weight, kind
        if kind not in ("nf4", "fp4"):
            parts.fail(f"has the type {kind!r}; expected 'nf4' or 'fp4'.")
        raw_state = self._tensor(f"quant_state.bitsandbytes__{kind}", "uint8")
        if raw_state.nbytes > _longest_state:
            parts.fail(
                f"has a quant_state of {raw_state.nbytes} bytes, above "
                f"{_longest_state}."
            )
        self.state = parse_object(raw_state.tobytes(), f"{parts.where}: quant_state")
        self._setting("quant_type", (kind,))
        self.block = self._size("blocksize")
        if self.block % 2:
            parts.fail(f"has the blocksize {self.block}, which must be even.")
        shape = self.state.get("shape")
        if not isinstance(shape, list) or not 0 < len(shape) <= 8:
            parts.fail(f"has the shape {shape!r}, which must have 1 to 8 axes.")
        self.shape = tuple(self._check_size(n, "shape") for n in shape)
        self.dtype = DTYPES[self._setting("dtype", tuple(DTYPES))]
        self.size = math.prod(self.shape)
        self.blocks = -(-self.size // self.block)
        self._check_packed(parts.tensor(weight))
        self.table = self._tensor("quant_map", "float32", 16)
        self.is_nested = f"{weight}.nested_absmax" in parts
        if self.is_nested != ("nested_blocksize" in self.state):
            parts.fail("must have both nested_absmax and nested_blocksize, or neither.")
        dtype = "uint8" if self.is_nested else "float32"
        parts.look_up_flat(f"{weight}.absmax", dtype, self.blocks)
        if self.is_nested:
            self._read_nested()

    def _check_packed(self, stored: Tensor) -> None:
        """Check the tensor of codes. Its dtype is the `quant_storage` of bitsandbytes,
        and does not matter."""
        itemsize, dtype = stored.dtype.itemsize, stored.dtype.name
        nbytes = itemsize * stored.size
        if dtype not in _storage_dtypes:
            self.parts.fail(f"must be {' or '.join(_storage_dtypes)}, got {dtype}.")
        if -(-self.size // (2 * itemsize)) != stored.size:
            self.parts.fail(f"has {nbytes} bytes for {self.size} 4-bit values.")
        self.parts.names.append(stored.name)

    def _read_nested(self) -> None:
        """Read the settings and tensors of absmax that is quantized itself."""
        self.nested_block = self._size("nested_blocksize")
        self.offset = self.state.get("nested_offset")
        if type(self.offset) is not float or not math.isfinite(self.offset):
            self.parts.fail(f"has the nested_offset {self.offset!r}.")
        self._setting("nested_dtype", ("float32",))
        nested_blocks = -(-self.blocks // self.nested_block)
        self.nested = self._tensor("nested_absmax", "float32", nested_blocks)
        self.nested_table = self._tensor("nested_quant_map", "float32", 256)

    def _setting(self, name: str, allowed: Sequence[str]) -> str:
        value = self.state.get(name)
        if value not in allowed:
            self.parts.fail(
                f"has the {name} {value!r}, not one of {', '.join(allowed)}."
            )
        return str(value)

    def _size(self, name: str) -> int:
        return self._check_size(self.state.get(name), name)

    def _check_size(self, value: Any, name: str) -> int:
        if type(value) is not int or not 0 < value < 2**63:
            self.parts.fail(
                f"has the {name} {value!r}, which must be a positive integer."
            )
        return value

    def _tensor(self, name: str, dtype: str, size: int | None = None) -> np.ndarray:
        name = f"{self.weight}.{name}"
        self.parts.look_up_flat(name, dtype, size)
        return self.parts.read(name).reshape(-1)

    def absmax(self) -> np.ndarray:
        """Return the absmax of each block, computed as bitsandbytes does."""
        absmax = self.parts.read(f"{self.weight}.absmax").reshape(-1)
        if not self.is_nested:
            return absmax
        nested = _repeat(self.nested, self.nested_block, self.blocks)
        with np.errstate(over="ignore", invalid="ignore"):
            return self.nested_table[absmax] * nested + np.float32(self.offset)

    def codes(self) -> np.ndarray:
        packed = self.parts.read(self.weight).reshape(-1).view(np.uint8)
        codes = np.empty((packed.size, 2), np.uint8)
        codes[:, 0], codes[:, 1] = packed >> np.uint8(4), packed & np.uint8(15)
        return codes.reshape(-1)[: self.size]

    def decode(self) -> np.ndarray:
        values, absmax = self.table[self.codes()], self.absmax()
        with np.errstate(over="ignore", invalid="ignore"):
            whole = self.size // self.block * self.block
            blocks = values[:whole].reshape(-1, self.block)
            blocks *= absmax[: len(blocks), None]  # Changes `values`.
            values[whole:] *= absmax[-1]
            return values.astype(self.dtype).reshape(self.shape)

    @property
    def row_block(self) -> int:
        """The largest block size that divides both the stored blocks and the rows."""
        return math.gcd(self.block, self.shape[-1])

    def inexact(self) -> str | None:
        """Return why no format stores this weight exactly, or `None`."""
        if self.kind == "fp4":
            return "is FP4, for which eqquant has no exact format."
        if self.table.tobytes() != np.array(NF4.table, np.float32).tobytes():
            return "has a quant_map other than the table of NF4."
        block = self.row_block
        if block % 2 or block < min(_smallest_block, self.block):
            return (
                f"has blocks of {self.block}, which cross its rows of "
                f"{self.shape[-1]}. Blocks of {block} would not cross them, but blocks "
                f"must be even and have at least {_smallest_block} values."
            )
        return None

    def quantized(self):
        if (problem := self.inexact()) is not None:
            raise NotExact(problem)
        (*lead, columns), block = self.shape, self.row_block
        codes, absmax = self.codes(), self.absmax()
        scales = _repeat(absmax, self.block // block, self.size // block)
        return from_levels(
            codes.reshape(self.shape),
            scales.reshape(*lead, columns // block),
            NF4(block_size=block),
            self.dtype,
        )

    def entry(self) -> Entry:
        kind = f"{self.kind} in blocks of {self.row_block}", not self.inexact()
        readers = self.decode, self.quantized
        return self.parts.entry(self.shape, self.dtype, *readers, kind)


def _repeat(values: np.ndarray, times: int, size: int) -> np.ndarray:
    """Repeat each value, up to `size` results. `times` comes from the file and may be
    huge, so bound it first."""
    return np.repeat(values, min(times, size))[:size]


#
# 8-bit weights
#


def _int8_entry(parts: Parts) -> Entry:
    shape = parts.look_up("weight", ("int8",), (None, None)).shape
    parts.look_up("SCB", ("float32",), shape[:1])
    if "weight_format" in parts:
        parts.look_up_flat("weight_format", "uint8", 1)
        if parts.read("weight_format").item() != 0:
            parts.fail("is not stored row by row: 'weight_format' must be 0.")

    def scales() -> np.ndarray:
        return parts.read("SCB").reshape(-1, 1) / np.float32(127)

    def decode() -> np.ndarray:
        return parts.read("weight").astype(np.float32) * scales()

    def quantized():
        return from_levels(parts.read("weight"), scales(), Int8())

    kind = "LLM.int8()", True
    return parts.entry(shape, np.dtype("float32"), decode, quantized, kind)
