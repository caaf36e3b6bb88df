"""Quantized arrays as blocks of ggml."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ...arrays import QuantizedArray
from ...formats import (
    FittedFormat,
    float_scales,
    Format,
    IntegerScales,
    MXFP4,
    PowerOfTwoScales,
    unpack,
)
from ..foreign import Blocks, Numbers, Type, TYPES
from ._ggml_pack import pack_blocks


_chunk = 2**20  # Values that are packed at once.
# The types whose blocks can be packed.
_targets = [t for t in TYPES.values() if t.format is not None]
_plain = {t.dtype: t for t in TYPES.values() if t.dtype is not None}


def type_of(array: Any) -> Type:
    """Return the type that stores an array, or raise `ValueError`."""
    if not isinstance(array, QuantizedArray):
        if array.dtype not in _plain:
            raise ValueError(
                f"has the dtype {array.dtype}; GGUF has {', '.join(map(str, _plain))}."
            )
        return _plain[array.dtype]
    array.check_whole()
    if array.axes != (-1,) or not array.size:
        raise ValueError(
            f"has the shape {array.shape} and blocks along the axes {array.axes}; GGUF "
            "has blocks along the last axis. Transpose it, or quantize it again."
        )
    same = [type for type in _targets if _fits(array.format, array.shape[-1], type)]
    if not same:
        names = ", ".join(type.name for type in _targets)
        raise ValueError(
            f"has the format {array.format!r}, which no type of GGUF stores: {names}. "
            "Quantize the original weight to one of the formats in the documentation "
            "of write_gguf."
        )
    for type in same:
        if array.shape[-1] % type.block == 0:
            return type
    raise ValueError(
        f"has rows of {array.shape[-1]}, which blocks of {same[0].block} in "
        f"{same[0].name} do not divide."
    )


def _fits(format: Format, size: int, type: Type) -> bool:
    """Return whether a type has the levels and the kind of scales of a format."""
    like: Any = type.format
    if _levels(format) != _levels(like) or format.has_offsets != like.has_offsets:
        return False
    block: int = format.block_size or size
    is_k = isinstance(format, FittedFormat) and format.is_k_quant
    if is_k != (isinstance(like, FittedFormat) and like.is_k_quant):
        return False
    other: int = like.block_size or size
    return block == other if is_k else block % other == 0


def _levels(format: Format) -> Any:
    """Describe the levels of codes, except for a constant."""
    return type(format), format.bits, format.codebook


def to_ggml(type: Type, q: QuantizedArray) -> np.ndarray:
    """Return the bytes of a quantized array, or raise `ValueError` with what would be
    lost."""
    format, size = q.format, q.shape[-1]
    scales, offsets = _numbers(type, q)
    packed = np.asarray(q.codes).reshape(q.size // size, -1)
    rows, out, blocks = max(1, _chunk // size), [], 0
    for i in range(0, len(packed), rows):
        codes = unpack(jnp.asarray(packed[i : i + rows]), format.bits, format.group)
        codes = np.asarray(codes)[:, :size].reshape(-1, type.block)
        if type.name == "TQ2_0":  # The file has no two's complement.
            codes = codes + np.uint8(1) & np.uint8(3)
        start, blocks = blocks, blocks + len(codes)
        some = offsets and offsets.rows(start, blocks)
        part = Blocks(codes, scales.rows(start, blocks), some)
        out.append(pack_blocks(type, part))
    return np.concatenate(out).reshape(-1)


def _numbers(type: Type, q: QuantizedArray) -> tuple[Numbers, Numbers | None]:
    """Return the scales and offsets of all blocks."""
    assert type.unpack is not None
    empty = type.unpack(np.zeros((1, type.nbytes), np.uint8))
    if isinstance(q.scales, IntegerScales):
        scales = _from_integers(q.scales, empty.scales)
        if empty.offsets is None:
            return scales, None
        return scales, _from_integers(q.offsets, empty.offsets)
    if empty.scales.integers is not None:
        raise ValueError(
            f"has scales that are not integers times a float16, as in {type.name}. "
            "Scaling an array changes its scales to floats: quantize it again."
        )
    if isinstance(q.scales, PowerOfTwoScales):
        return Numbers(_per_block(np.asarray(q.scales.exponents), type, q)), None
    if isinstance(q.format, MXFP4):
        raise ValueError(
            "has scales that are not powers of two: quantize it again, because scaling "
            "an array changes its scales to floats."
        )
    scales = np.asarray(float_scales(q.scales), np.float64)
    in_file = _in_float16("scales", scales, type, q)
    if q.offsets is None:
        return in_file, None
    assert type.format is not None
    shift = float(q.format.lowest_level - type.format.lowest_level)
    offsets = np.asarray(float_scales(q.offsets), np.float64) + shift * scales
    return in_file, _in_float16("offsets", offsets, type, q)


def _from_integers(scales: Any, like: Numbers) -> Numbers:
    units = np.asarray(scales.units).reshape(-1, 1)
    integers = np.asarray(scales.integers).reshape(len(units), -1)
    integers = integers - integers.dtype.type(like.lowest)
    return Numbers(units if like.sign > 0 else -units, integers)


def _in_float16(name: str, values: np.ndarray, type: Type, q: QuantizedArray):
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.array_equal(halves, values, equal_nan=True):
        raise ValueError(
            f"has {name} that the float16 of {type.name} cannot represent. Quantize "
            'the original weight with scale_dtype="float16".'
        )
    return Numbers(_per_block(halves, type, q))


def _per_block(values: np.ndarray, type: Type, q: QuantizedArray) -> np.ndarray:
    """Repeat the numbers of longer blocks for blocks of the type."""
    blocks = q.shape[-1] // type.block
    copies = (q.format.block_size or q.shape[-1]) // type.block
    repeated = np.repeat(values, copies, -1)[..., :blocks]
    return np.ascontiguousarray(repeated).reshape(-1, 1)
