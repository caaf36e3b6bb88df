"""Check that codes, scales and offsets fit a format and each other."""

import dataclasses
import functools as ft
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ._format import Format, SCALE_DTYPES
from ._pack import num_codes
from ._scales import scales_and_offsets, ShortScales
from ._two_level_scales import (
    Float8Scales,
    FourBitScales,
    IntegerScales,
    num_groups,
    QuantizedOffsets,
    QuantizedScales,
)


def problems_of(
    format: Format,
    codes: Any,
    scales: Any,
    offsets: Any = None,
    *,
    size: int | None = None,
    exact: bool = True,
    joined: bool = False,
) -> Iterator[TypeError | ValueError]:
    """Yield an error for each invariant that the parts of an array violate.

    Only shapes and dtypes are read, so the parts may be abstract. `size` is the logical
    length of the blocked axis, by default the number of stored codes. With
    `exact=False`, scales and offsets may be float arrays of any supported dtype, as
    after scaling an array. With `joined=True`, several rows may be joined to one. So a
    row may have any number of blocks of equal size.
    """
    if not codes.ndim or not scales.ndim:
        yield ValueError("codes and scales must have at least one axis.")
        return
    if codes.dtype != format.code_dtype:
        yield TypeError(
            f"codes of {format!r} must be {jnp.dtype(format.code_dtype)}, got "
            f"{codes.dtype}."
        )
    yield from _problems_of_kinds(format, scales, offsets, exact)
    if format.has_offsets != (offsets is not None):
        needs = "needs" if format.has_offsets else "has no"
        yield ValueError(f"{format!r} {needs} offsets.")
    elif offsets is not None and offsets.shape != scales.shape:
        yield ValueError(
            f"offsets must have the shape {scales.shape} of scales, got "
            f"{offsets.shape}."
        )
    if scales.shape[:-1] != codes.shape[:-1]:
        yield ValueError(
            f"scales must have the leading axes {codes.shape[:-1]} of codes, got "
            f"{scales.shape[:-1]}."
        )
    stored = num_codes(codes.shape[-1], format.bits)
    size = stored if size is None else size
    if stored != format.padded(size):
        yield ValueError(
            f"codes hold {stored} values along the blocked axis, but {format!r} stores "
            f"{format.padded(size)} for a size of {size}."
        )
    blocks = scales.shape[-1]
    if joined and (stored % blocks if blocks else stored):
        yield ValueError(f"scales must have blocks that divide {stored}, got {blocks}.")
    if not joined and blocks != format.num_blocks(size):
        yield ValueError(
            f"scales must have {format.num_blocks(size)} blocks for a size of {size} "
            f"in {format!r}, got {blocks}."
        )


@ft.cache
def abstract_scales(format: Format) -> tuple[Any, Any]:
    """Return abstract scales, and abstract offsets or None, of one block."""
    # Arrays are abstract here, because this also runs while JAX traces a product.
    parts = jax.eval_shape(lambda: format.no_scales((), 1))
    return scales_and_offsets(parts, format)


def _problems_of_kinds(
    format: Format, scales: Any, offsets: Any, exact: bool
) -> Iterator[TypeError | ValueError]:
    given = {"scales": scales, "offsets": offsets}
    expected = (None, None)
    if exact or any(isinstance(part, ShortScales) for part in given.values()):
        expected = abstract_scales(format)
    part: Any
    kind: Any
    for (name, part), kind in zip(given.items(), expected, strict=True):
        is_short = isinstance(part, ShortScales)
        if part is None or (exact and kind is None):
            continue
        if (exact or is_short) and _kind(part) != _kind(kind):
            yield TypeError(
                f"{name} of {format!r} must be {_kind(kind)}, got {_kind(part)}."
            )
        elif is_short:
            yield from problems_of_scales(part)
            dtypes, needed = (
                [a.dtype for a in jax.tree.leaves(x)] for x in (part, kind)
            )
            if dtypes != needed:
                yield TypeError(f"parts of {name} must be {needed}, got {dtypes}.")
        elif part.dtype.name not in ([kind.dtype.name] if exact else SCALE_DTYPES):
            dtypes = kind.dtype if exact else f"one of {SCALE_DTYPES}"
            yield TypeError(f"{name} must be {dtypes} in {format!r}, got {part.dtype}.")


def _kind(scales: Any) -> str:
    is_short = isinstance(scales, ShortScales)
    return f"eqquant.formats.{type(scales).__name__}" if is_short else "an array"


def problems_of_scales(scales: ShortScales) -> Iterator[TypeError | ValueError]:
    """Yield an error for each part of short scales that does not fit the others."""
    kind = type(scales).__name__
    names = [field.name for field in dataclasses.fields(scales)]
    if any(getattr(scales, name) is None for name in names):
        yield ValueError(f"{kind} must have {' and '.join(names)}.")
    elif not scales.ndim:
        yield ValueError(f"{kind} must have at least one axis.")
    else:
        for name, (dtype, shape) in _parts_of(scales).items():
            part = getattr(scales, name)
            if part.dtype != dtype or part.shape != shape:
                yield ValueError(
                    f"{name} of {kind} must be {dtype}{shape}, got "
                    f"{part.dtype}{part.shape}."
                )


def _parts_of(scales: ShortScales) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and the shape of each part, from the shape of the scales."""
    shape, lead = scales.shape, scales.shape[:-1]
    if isinstance(scales, QuantizedScales):
        dtype = "int8" if isinstance(scales, QuantizedOffsets) else "uint8"
        exponents = "uint8", (*lead, num_groups(shape[-1]))
        return {"codes": (dtype, shape), "exponents": exponents}
    if isinstance(scales, IntegerScales):
        is_short = isinstance(scales, FourBitScales)
        dtype = "uint8" if is_short else scales.codes.dtype.name
        units = "float16", (*lead, -(-shape[-1] // scales.group))
        return {"codes": (dtype, scales.codes.shape), "units": units}
    if isinstance(scales, Float8Scales):
        return {"codes": ("uint8", shape), "units": ("float32", (*lead, 1))}
    return {"exponents": ("uint8", shape)}
