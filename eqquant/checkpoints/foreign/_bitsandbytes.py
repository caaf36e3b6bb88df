"""bitsandbytes weights in safetensors: NF4, FP4 and LLM.int8().

A 4-bit weight is a tensor of bytes with two codes per byte, the first in the high half.
Blocks run over the flattened weight, row after row. Separate tensors hold the absmax of
each block (which may be quantized), the table of levels, and JSON with the other
settings. An 8-bit weight has the absmax of each row in `SCB`.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import Int8, NF4
from ..files import parse_object, Source
from ._entry import Entry, from_levels, NotExact


STATE = ".quant_state.bitsandbytes__"
# The block sizes that bitsandbytes writes.
BLOCK_SIZES = tuple(2**i for i in range(5, 13))
DTYPES = {
    name: np.dtype(getattr(jnp, name)) for name in ("float32", "float16", "bfloat16")
}
# Smaller blocks would take more scales than weights.
_smallest_block = 8
_longest_state = 2**16


def bitsandbytes_entries(source: Source) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name in source.tensors:
        weight, found, kind = name.partition(STATE)
        if found:
            state = _State(source, weight, kind)
            if weight in entries:
                raise ValueError(f"{state.where} has two quant_state tensors.")
            entries[weight] = state.entry()
        elif name.endswith(".SCB") or name == "SCB":
            weight = name.removesuffix("SCB") + "weight"
            entries[weight] = _int8_entry(source, weight, name)
    return entries


#
# 4-bit weights
#


class _State:
    """The checked quantization state of a 4-bit weight."""

    def __init__(self, source: Source, weight: str, kind: str):
        self.source, self.weight = source, weight
        self.where = f"{source.path}: {weight!r} of bitsandbytes"
        self.names = {weight, f"{weight}{STATE}{kind}"}
        if kind not in ("nf4", "fp4"):
            self.fail(f"has the type {kind!r}; expected 'nf4' or 'fp4'.")
        raw_state = self._tensor(f"quant_state.bitsandbytes__{kind}", np.uint8, None)
        if raw_state.nbytes > _longest_state:
            self.fail(
                f"has a quant_state of {raw_state.nbytes} bytes, above "
                f"{_longest_state}."
            )
        state = parse_object(raw_state.tobytes(), f"{self.where}: quant_state")
        self.kind = kind
        if state.get("quant_type") != kind:
            self.fail(f"has the quant_type {state.get('quant_type')!r}, not {kind!r}.")
        self.block = self._size(state.get("blocksize"), "blocksize")
        if self.block % 2:
            self.fail(f"has the blocksize {self.block}, which must be even.")
        shape = state.get("shape")
        if not isinstance(shape, list) or not 0 < len(shape) <= 8:
            self.fail(f"has the shape {shape!r}, which must have 1 to 8 axes.")
        self.shape = tuple(self._size(n, "shape") for n in shape)
        dtype = state.get("dtype")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.fail(f"has the dtype {dtype!r}, not one of {list(DTYPES)}.")
        self.dtype = DTYPES[str(dtype)]
        self.size = math.prod(self.shape)
        self.blocks = -(-self.size // self.block)
        stored = source.tensors.get(weight)
        if stored is None or stored.dtype != np.uint8:
            self.fail("must be a tensor of uint8.")
        if stored.size != -(-self.size // 2):
            self.fail(f"has {stored.size} bytes for {self.size} 4-bit values.")
        self.table = self._tensor("quant_map", np.float32, 16)
        self.is_nested = f"{weight}.nested_absmax" in source.tensors
        if self.is_nested != ("nested_blocksize" in state):
            self.fail("must have both nested_absmax and nested_blocksize, or neither.")
        self._look_up(f"{weight}.absmax", np.uint8 if self.is_nested else np.float32)
        if self.is_nested:
            self.nested_block = self._size(
                state.get("nested_blocksize"), "nested_blocksize"
            )
            self.offset = state.get("nested_offset")
            if type(self.offset) is not float or not math.isfinite(self.offset):
                self.fail(f"has the nested_offset {self.offset!r}.")
            if state.get("nested_dtype") != "float32":
                self.fail(f"has the nested_dtype {state.get('nested_dtype')!r}.")
            self.nested = self._tensor(
                "nested_absmax", np.float32, -(-self.blocks // self.nested_block)
            )
            self.nested_table = self._tensor("nested_quant_map", np.float32, 256)

    def fail(self, problem: str):
        raise ValueError(f"{self.where} {problem}")

    def _size(self, value: Any, name: str) -> int:
        if type(value) is not int or not 0 < value < 2**63:
            self.fail(f"has the {name} {value!r}, which must be a positive integer.")
        return value

    def _look_up(self, name: str, dtype: Any, size: int | None = -1):
        size = self.blocks if size == -1 else size
        stored = self.source.tensors.get(name)
        if stored is None:
            self.fail(f"needs {name!r}, which is missing.")
        elif stored.dtype != dtype or size not in (None, stored.size):
            count = "any number" if size is None else size
            self.fail(
                f"must have {count} of {np.dtype(dtype)} in {name!r}, but has "
                f"{stored.size} of {stored.dtype}."
            )
        self.names.add(name)

    def _tensor(self, name: str, dtype: Any, size: int | None) -> np.ndarray:
        name = f"{self.weight}.{name}"
        self._look_up(name, dtype, size)
        return self.source.read(name).reshape(-1)

    def absmax(self) -> np.ndarray:
        """Return the absmax of each block, computed as bitsandbytes does."""
        absmax = self.source.read(f"{self.weight}.absmax").reshape(-1)
        if not self.is_nested:
            return absmax
        nested = _repeat(self.nested, self.nested_block, self.blocks)
        with np.errstate(over="ignore", invalid="ignore"):
            return self.nested_table[absmax] * nested + np.float32(self.offset)

    def codes(self) -> np.ndarray:
        packed = self.source.read(self.weight).reshape(-1)
        codes = np.empty((packed.size, 2), np.uint8)
        codes[:, 0], codes[:, 1] = packed >> np.uint8(4), packed & np.uint8(15)
        return codes.reshape(-1)[: self.size]

    def decode(self) -> np.ndarray:
        values, absmax = self.table[self.codes()], self.absmax()
        with np.errstate(over="ignore", invalid="ignore"):
            values *= _repeat(absmax, self.block, self.size)
            return values.astype(self.dtype).reshape(self.shape)

    @property
    def row_block(self) -> int:
        """The largest block size that divides both the stored blocks and the rows."""
        return math.gcd(self.block, self.shape[-1])

    def inexact(self) -> str | None:
        """Return why no format stores this weight exactly, or `None`."""
        if self.kind == "fp4":
            return "is FP4, for which eqquant has no exact format."
        if self.table.tobytes() != np.array(NF4.codebook, np.float32).tobytes():
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
        return Entry(
            self.where, self.shape, self.dtype, *readers, kind, tuple(self.names)
        )


def _repeat(values: np.ndarray, times: int, size: int) -> np.ndarray:
    """Repeat each value, up to `size` results. `times` comes from the file and may be
    huge, so bound it first."""
    return np.repeat(values, min(times, size))[:size]


#
# 8-bit weights
#


def _int8_entry(source: Source, weight: str, scb: str) -> Entry:
    where = f"{source.path}: {weight!r} of bitsandbytes"
    prefix = weight.removesuffix("weight")
    stored, rows = source.tensors.get(weight), source.tensors[scb]
    if stored is None or stored.dtype != np.int8 or len(stored.shape) != 2:
        raise ValueError(f"{where} has {scb!r}, so it must be a matrix of int8.")
    if rows.dtype != np.float32 or rows.shape != stored.shape[:1]:
        raise ValueError(
            f"{where} of the shape {stored.shape} must have {stored.shape[0]} of "
            f"float32 in {scb!r}, but has {rows.shape} of {rows.dtype}."
        )
    names = {weight, scb}
    order = f"{prefix}weight_format"
    if order in source.tensors:
        names.add(order)
        stored_order = source.tensors[order]
        if (
            stored_order.size != 1
            or stored_order.dtype != np.uint8
            or source.read(order).item() != 0
        ):
            raise ValueError(
                f"{where} is not stored row by row: {order!r} must be a uint8 of 0."
            )

    def scales() -> np.ndarray:
        return source.read(scb).reshape(-1, 1) / np.float32(127)

    def decode() -> np.ndarray:
        return source.read(weight).astype(np.float32) * scales()

    def quantized():
        return from_levels(source.read(weight), scales(), Int8())

    kind, dtype = ("LLM.int8()", True), np.dtype("float32")
    return Entry(where, stored.shape, dtype, decode, quantized, kind, tuple(names))
