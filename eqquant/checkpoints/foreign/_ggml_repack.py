"""Repack blocks of GGUF files as codes, scales and offsets of formats."""

import functools as ft
from typing import Any

import jax
import numpy as np

from ...formats import FittedFormat, MXFP4
from ...kernels.cpu import find_layouts, Layout, relayout
from ._entry import (
    check_levels,
    codes_of_levels,
    integers_times,
    packed_codes,
    packed_levels,
    stored_scales,
)
from ._ggml import Type, TYPES


_bytes = np.arange(256, dtype=np.uint8).view(np.int8)
_types = {kind.name: kind for kind in TYPES.values()}


def repacked(kind: Type, raw: np.ndarray, out: Any = None) -> tuple:
    """Return codes, scales and offsets of blocks of bytes, `(count, nbytes)`, as the
    format stores them: arrays `(count, n)`. Raise [`NotExact`][] if it cannot.

    `out` has contiguous arrays of any shapes for the result. A native kernel writes
    into them if they have the right sizes.
    """
    native = _native(kind.name)
    if native is None:
        parts = _repacked(kind, raw)
    else:
        like, treedef = jax.tree.flatten(parts_of_block(kind.name))
        outs, found = jax.tree.flatten(out)
        sizes = [len(raw) * leaf.nbytes for leaf in like]
        if found == treedef and [out.nbytes for out in outs] == sizes:
            outs = [out.reshape(len(raw), -1).view(np.uint8) for out in outs]
        else:
            outs = [None] * len(like)
        leaves = [
            relayout(layout, raw, out).view(leaf.dtype)
            for layout, leaf, out in zip(native, like, outs, strict=True)
        ]
        parts = jax.tree.unflatten(treedef, leaves)
    if _has_bytes(kind):
        assert kind.format is not None
        check_levels(parts[0], kind.format)
    return parts


@ft.cache
def _native(name: str) -> list[Layout] | None:
    """Return the layout of each part, for types whose repacking only moves and flips
    bits."""
    kind = _types[name]
    if not (_has_bytes(kind) or _has_codes_of_format(kind)):
        return None  # It can raise an error.

    def leaves(raw: np.ndarray) -> list[np.ndarray]:
        parts = jax.tree.leaves(_repacked(kind, raw))
        return [np.ascontiguousarray(part).view(np.uint8) for part in parts]

    return find_layouts(leaves, kind.nbytes)


@ft.cache
def parts_of_block(name: str) -> tuple:
    """Return the parts of a block with arbitrary values, for a type with a format."""
    kind = _types[name]  # Every type has codes and scales of these bits.
    return _repacked(kind, np.full((1, kind.nbytes), 0x14, np.uint8))


def _repacked(kind: Type, raw: np.ndarray) -> tuple:
    """Repack in NumPy, without the check of bytes. Codes are copied without unpacking
    if the file packs them as the format does."""
    format: Any = kind.format
    assert kind.unpack is not None and kind.levels is not None
    blocks = kind.unpack(raw)
    is_k = isinstance(format, FittedFormat) and format.is_k_quant

    def numbers(given: Any) -> Any:
        if given is None:
            return None
        if is_k:
            return integers_times(given.signed_units, given.factors, format)
        is_half = given.integers is None and given.units.dtype == np.float16
        return given.signed_units if is_half else given.decode()

    scales = stored_scales(numbers(blocks.scales), numbers(blocks.offsets), format)
    if _has_codes_of_format(kind):
        if blocks.bits == format.bits < 8:
            return blocks.codes, *scales
        return packed_codes(blocks.unpacked(), format), *scales
    codes = blocks.unpacked()
    if _has_bytes(kind):
        return codes.view(np.int8), *scales
    levels = codes if format.codebook else kind.levels[codes]
    if isinstance(format, MXFP4):
        levels[levels == 8] = 0  # ggml decodes -0 to 0.
    return packed_levels(levels, format), *scales


def _has_bytes(kind: Type) -> bool:
    """Return whether codes are levels of 8 bits."""
    return kind.levels is not None and np.array_equal(kind.levels, _bytes)


def _has_codes_of_format(kind: Type) -> bool:
    """Return whether each code of a type stands for the same level in its format."""
    format: Any = kind.format
    if format.codebook:
        return not isinstance(format, MXFP4)
    to_codes, *_ = codes_of_levels(format)
    assert kind.levels is not None
    return np.array_equal(to_codes(kind.levels), np.arange(len(kind.levels)))
