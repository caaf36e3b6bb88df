"""Integers of 2 to 8 bits with zero points, packed into int32 by AutoGPTQ, GPTQModel,
AutoAWQ and compressed-tensors: `value = (code - zero) * scale`.

A [`Packing`][] describes the tensors of a library. GPTQ and AWQ store a column for each
output, and `config.json` has the settings of all weights. compressed-tensors stores a
row for each output, and the shapes of the tensors determine the settings.
"""

import dataclasses
import functools as ft
import math
from typing import Any

import numpy as np

from ..._jax import warn
from ...formats import Format, Int2, Int3, Int4, Int5, Int6, Int8
from ...trees import errors_at
from ..files import Source
from ._config import PackingConfig
from ._entry import Entry, from_codes, from_levels, NotExact
from ._parts import find_parts, Parts, SCALE_DTYPES


@dataclasses.dataclass(frozen=True)
class Packing:
    """The tensors of a weight in the files of a library.

    **Fields:**

    - `codes`, `scales`, `zeros`, `order`: the names of the tensors. `order` contains
        the group of each input.
    - `is_transposed`: whether tensors have a column, not a row, for each output.
    - `packs_inputs`: whether an int32 holds the codes of several inputs, not outputs.
        The zero points of several outputs always share an int32.
    - `is_interleaved`: whether an int32 holds first the even, then the odd codes.
    """

    library: str
    codes: str
    scales: str
    zeros: str
    order: str
    is_transposed: bool
    packs_inputs: bool
    is_interleaved: bool = False


_at_once = 2**18  # Values that are decoded at once.
_of_gptq = "qweight", "scales", "qzeros", "g_idx"
GPTQ = Packing("GPTQ", *_of_gptq, is_transposed=True, packs_inputs=True)
AWQ = Packing(
    "AWQ", *_of_gptq, is_transposed=True, packs_inputs=False, is_interleaved=True
)
COMPRESSED_TENSORS = Packing(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    is_transposed=False,
    packs_inputs=True,
)
# Formats that contain the integers of each number of bits.
_formats: dict[int, type[Format]] = {
    **{1: Int2, 2: Int2, 3: Int3, 4: Int4, 5: Int5, 6: Int6, 7: Int8, 8: Int8}
}
_bits_of_gptq = (2, 3, 4, 8)


#
# Settings of a weight
#


def gptq_entries(source: Source, config: PackingConfig) -> dict[str, Entry]:
    bits = config.one_of("bits", _bits_of_gptq)
    block = config.block_size()
    symmetric = config.one_of("sym", (True, False), True)
    needs_order = config.one_of("desc_act", (True, False), False)
    names = "checkpoint_format", "format"
    # Zero points are stored minus one, except in the layout `gptq_v2`.
    shift = int(config.check_layout(names, ("gptq", "gptq_v2")) == "gptq")
    config.one_of("pack_dtype", ("int32",), "int32")
    entries = {}
    for parts in find_parts(source, GPTQ.codes, GPTQ.library):
        weight = _columns(parts, GPTQ, bits, block, symmetric, shift)
        if needs_order and not weight.has_order:
            parts.fail("needs 'g_idx', which is missing: desc_act is true.")
        entries[parts.weight] = weight.entry()
    return entries


def awq_entries(source: Source, config: PackingConfig) -> dict[str, Entry]:
    bits = config.one_of("bits", (4,))
    config.check_layout(("version", "checkpoint_format", "format"), ("gemm",))
    block = config.block_size()
    return {
        parts.weight: _columns(parts, AWQ, bits, block, symmetric=False).entry()
        for parts in find_parts(source, AWQ.codes, AWQ.library)
    }


def compressed_tensors_entries(source: Source) -> dict[str, Entry]:
    packing = COMPRESSED_TENSORS
    declared = _declared_bits(source)
    return {
        parts.weight: _rows(parts, packing, declared).entry()
        for parts in find_parts(source, packing.codes, packing.library)
        if parts.tensor(packing.codes).dtype == np.int32
    }


def _columns(
    parts: Parts,
    packing: Packing,
    bits: int,
    block: int | None,
    symmetric: bool,
    shift: int = 0,
) -> "PackedWeight":
    """Describe a weight of GPTQ or AWQ."""
    stored = parts.look_up(packing.codes, ("int32",), (None, None)).shape
    inputs, outputs = stored
    if packing.packs_inputs:
        inputs = count_codes(inputs, bits)
    else:
        outputs = count_codes(outputs, bits)
    packed_outputs = outputs * bits // 32
    if not inputs or not outputs or count_codes(packed_outputs, bits) != outputs:
        parts.fail(
            f"has {packing.codes!r} of the shape {stored}, which does not unpack to a "
            f"matrix of {bits} bits."
        )
    blocks = 1 if block is None else -(-inputs // block)
    parts.look_up(packing.scales, SCALE_DTYPES, (blocks, outputs))
    parts.look_up(packing.zeros, ("int32",), (blocks, packed_outputs))
    shape = outputs, inputs
    return PackedWeight(parts, packing, shape, bits, block, symmetric, shift)


def _declared_bits(source: Source) -> set[int]:
    """Return the numbers of bits that `config.json` declares, if there is one."""
    config = (source.config() or {}).get("quantization_config")
    groups = config.get("config_groups") if isinstance(config, dict) else None
    groups = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    bits = {w.get("num_bits") for w in weights if isinstance(w, dict)}
    return {n for n in bits if type(n) is int} or set(_formats)


def _rows(parts: Parts, packing: Packing, declared: set[int]) -> "PackedWeight":
    """Describe a weight of compressed-tensors. `weight_shape` contains the number of
    inputs, because the last int32 of a row may be partial. Versions before 0.13 padded
    each int32 of 3, 5, 6 or 7 bits; other sizes of rows reveal them."""
    rows, packed = stored = parts.look_up(packing.codes, ("int32",), (None, None)).shape
    parts.look_up("weight_shape", ("int64", "int32"), (2,))
    shape = tuple(map(int, parts.read("weight_shape")))
    columns = shape[1]
    fits = lambda bits: packed and packed == _packed_size(columns, bits)
    candidates = [bits for bits in sorted(declared & _formats.keys()) if fits(bits)]
    if shape[0] != rows or not rows or columns < 1 or len(candidates) != 1:
        parts.fail(
            f"has {packing.codes!r} of the shape {stored} and the 'weight_shape' "
            f"{shape}, which fit {len(candidates)} packings in {sorted(declared)} "
            "bits. Put the config.json of the model beside the file."
        )
    (bits,) = candidates
    blocks = parts.look_up(packing.scales, SCALE_DTYPES, (rows, None)).shape[1]
    if not blocks or columns % blocks:
        parts.fail(f"has {columns} columns, which do not divide into {blocks} groups.")
    if has_zeros := packing.zeros in parts:
        parts.look_up(packing.zeros, ("int32",), (_packed_size(rows, bits), blocks))
    block, symmetric = columns // blocks, not has_zeros
    return PackedWeight(parts, packing, (rows, columns), bits, block, symmetric)


#
# Tensors of a weight
#


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A matrix with one row per output.

    **Fields:**

    - `bits`: the number of bits per code.
    - `block`: the number of columns that share a scale; `None` for the whole row.
    - `symmetric`: whether every zero point should be the middle code.
    - `shift`: the number to add to stored zero points.
    """

    parts: Parts
    packing: Packing
    shape: tuple[int, int]
    bits: int
    block: int | None
    symmetric: bool
    shift: int = 0

    def entry(self) -> Entry:
        if self.has_order:
            self.parts.look_up(self.packing.order, ("int32",), (self.shape[1],))
        with errors_at(self.parts.where):
            kind = f"{self.packing.library}, {self._format(not self.symmetric)!r}"
        readers = self._decode, self._quantized
        return self.parts.entry(self.shape, self.dtype, *readers, (kind, True))

    @property
    def has_order(self) -> bool:
        return self.packing.order in self.parts

    @property
    def dtype(self) -> np.dtype:
        return self.parts.tensor(self.packing.scales).dtype

    def _format(self, affine: bool) -> Format:
        block = self.block if (self.block or 0) < self.shape[1] else None
        options: dict[str, Any] = {"block_size": block, "scale_dtype": "float32"}
        options["affine"] = affine
        if self.bits < 7:
            options["fit"] = "absmax"
        return _formats[self.bits](**options)

    def _read(self, name: str) -> np.ndarray:
        """Read a tensor with one row per output."""
        array = self.parts.read(name)
        return array.T if self.packing.is_transposed else array

    def _scales(self) -> np.ndarray:
        """Read `(rows, blocks)`."""
        return self._read(self.packing.scales).astype(np.float32)

    def _unpack(self, name: str, axis: int) -> np.ndarray:
        packed = self._read(name)
        if self.packing.is_interleaved:
            return _interleaved(unpack_int32(packed, self.bits, axis))
        return unpack_int32(packed, self.bits, axis)

    def _codes(self) -> np.ndarray:
        """Read `(rows, columns)`, uint8."""
        codes = self._unpack(self.packing.codes, 1 if self.packing.packs_inputs else 0)
        return codes[:, : self.shape[1]]

    def _zeros(self) -> np.ndarray:
        """Read `(rows, blocks)`, integers."""
        name, rows = self.packing.zeros, self.shape[0]
        if name not in self.parts:
            return np.full((rows, 1), 2 ** (self.bits - 1), np.int32)
        zeros = self._unpack(name, 0)[:rows].astype(np.int32)
        if self.shift and self.symmetric and np.all(zeros == 2 ** (self.bits - 1)):
            # A symmetric weight in the layout `gptq` stores the middle minus one.
            warn(
                f"{self.parts.path}: the zero points of symmetric weights are "
                f"{2 ** (self.bits - 1)}, which only the layout gptq_v2 stores, but "
                "checkpoint_format is gptq. They are read as gptq_v2.",
                UserWarning,
                once=True,
            )
            return zeros
        zeros += self.shift
        if np.any(zeros == 2**self.bits):
            # Libraries disagree whether this value wraps to 0 or exceeds the codes.
            raise ValueError(
                f"{self.parts.where}: {name!r} has a zero point of {2**self.bits}, "
                f"which is out of range for {self.bits} bits. Save the checkpoint as "
                "gptq_v2."
            )
        return zeros

    @ft.cached_property
    def _order(self) -> np.ndarray:
        """The group of each column."""
        if not self.has_order:
            return np.arange(self.shape[1]) // (self.block or self.shape[1])
        name, blocks = self.packing.order, self._scales().shape[1]
        order = self.parts.read(name)
        if np.any((order < 0) | (order >= blocks)):
            raise ValueError(
                f"{self.parts.where}: groups in {name!r} must be from 0 to "
                f"{blocks - 1}, got {order.min()} to {order.max()}."
            )
        return order

    def _decode(self) -> np.ndarray:
        scales = self._scales()
        zeros = np.broadcast_to(self._zeros(), scales.shape)
        codes, order = self._codes(), self._order
        out = np.empty(self.shape, self.dtype)
        step = max(1, _at_once // self.shape[1])
        for i in range(0, self.shape[0], step):
            rows = slice(i, i + step)
            levels = codes[rows].astype(np.float32)
            levels -= zeros[rows, order]
            with np.errstate(over="ignore", invalid="ignore"):
                levels *= scales[rows, order]
                out[rows] = levels
        return out

    def _quantized(self):
        zeros, scales = self._zeros(), self._scales()
        if self.has_order:
            order = _order_of_blocks(self._order, self.block)
            zeros = np.broadcast_to(zeros, scales.shape)[:, order]
            scales = scales[:, order]
        middle = 2 ** (self.bits - 1)
        if self.symmetric and np.all(zeros == middle):
            levels = self._codes().astype(np.int16) - np.int16(middle)
            if levels.min(initial=0) > -128:  # Int8 without offsets has no -128.
                return from_levels(levels, scales, self._format(False), self.dtype)
        offsets = -zeros * scales.astype(np.float64)
        format = self._format(True)
        return from_codes(self._codes(), scales, offsets, format, self.dtype)


def _order_of_blocks(order: np.ndarray, block: int | None) -> np.ndarray:
    """Return the scale index of each block of consecutive columns, which must all use
    the same scale."""
    step = min(block or len(order), len(order))
    first = order[::step]
    if np.any(np.repeat(first, step)[: len(order)] != order):
        raise NotExact(
            "has columns that are not consecutive within their groups, because they "
            "were quantized in the order of activations (desc_act)."
        )
    return first


#
# Codes in int32, the first code in the lowest bits
#


def count_codes(packed: int, bits: int) -> int:
    """Return the number of codes in `packed` int32 values; 0 if the last code would be
    incomplete."""
    return packed * 32 // bits if packed % _period(bits) == 0 else 0


def _packed_size(codes: int, bits: int) -> int:
    return -(-codes * bits // 32)


def _period(bits: int) -> int:
    """Return the smallest number of int32 values that hold whole codes."""
    return bits // math.gcd(bits, 32)


def unpack_int32(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unpack int32 values to uint8 codes along an axis. Codes of 3, 5, 6 and 7 bits may
    cross from one int32 to the next."""
    period = _period(bits)
    packed = np.moveaxis(packed.view(np.uint32), axis, 0)
    missing = -len(packed) % period
    packed = np.pad(packed, [(0, missing)] + [(0, 0)] * (packed.ndim - 1))
    packed = packed.reshape(len(packed) // period, period, *packed.shape[1:])
    count, mask = count_codes(period, bits), np.uint32(2**bits - 1)
    out = np.empty((len(packed), count, *packed.shape[2:]), np.uint8)
    for i in range(count):
        index, shift = divmod(i * bits, 32)
        codes = packed[:, index] >> np.uint32(shift)
        if shift + bits > 32:
            codes |= packed[:, index + 1] << np.uint32(32 - shift)
        out[:, i] = codes & mask
    return np.moveaxis(out.reshape(len(packed) * count, *out.shape[2:]), 0, axis)


def _interleaved(codes: np.ndarray) -> np.ndarray:
    """Sort eight codes of outputs, first the even and then the odd ones."""
    size = codes.shape[1]
    return codes.reshape(-1, 2, 4, size).swapaxes(1, 2).reshape(-1, size)
