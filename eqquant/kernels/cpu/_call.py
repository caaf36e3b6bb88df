"""Calls of the native kernels through the foreign function interface of XLA."""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._jax import apart
from ...formats import (
    Float8Scales,
    float_scales,
    Format,
    FourBitScales,
    GROUP,
    IntegerScales,
    PowerOfTwoScales,
    QuantizedScales,
)
from .._product import Product, View
from ._library import load


# The numbers of `ScaleType` in `src/runtime/product.h`.
_scale_types = {"float32": 0, "bfloat16": 1, "float16": 2}
_integer_types = {"uint8": 3, "int8": 4}
_exponent, _float8 = 7, 8
# The numbers of a linear table.
_most_levels, _most_masks = 128, 8
# The bits of the exponent of each float8 kind.
_exponent_bits = {None: 0, "e4m3fn": 4, "e5m2": 5}


def call(
    kernel: str,
    product: Product,
    x,
    codes,
    scales,
    x_unit=None,
    offsets=None,
    rounds: bool = False,
    view: View | None = None,
) -> Array:
    """Compute a product by the native kernel of a name. With `rounds`, the kernel
    rounds each row of the activation to int8."""
    library = load()
    assert not isinstance(library, str), library
    format = product.format
    run = run_of(product)
    if x.dtype != jnp.bfloat16:  # The kernels read bfloat16 and float32 rows.
        x = x.astype(jnp.float32)
    scratch = library.scratch(
        kernel.encode(),
        product.contract_rows,
        x.dtype == jnp.bfloat16,
        math.prod(product.batch),
        product.m,
        product.rows,
        product.packed,
        product.blocks,
        run,
        format.bits,
        rounds,
        offsets is not None,
        format.history > 0,
    )
    results = (
        jax.ShapeDtypeStruct((*product.batch, product.m, product.free), jnp.float32),
        # XLA allocates the memory of the kernel, and accounts for it.
        jax.ShapeDtypeStruct((max(scratch, 1),), jnp.uint8),
    )
    index, own_scales = (), True
    if view is not None:
        index, codes = (view.index.astype(jnp.int32),), view.codes
        numbers = view.scales, view.offsets
        # Do not decode the scales of a stack.
        if view.scales is not None and not any(map(_is_decoded, numbers)):
            own_scales, (scales, offsets) = False, numbers
    levels = _levels(format)
    stored = _stored(scales)
    added = _Stored(levels, 0) if offsets is None else _stored(offsets)
    out, _ = jax.ffi.ffi_call("eqquant_dot", results)(
        x,
        codes,
        stored.scales,
        levels if stored.outer is None else stored.outer,
        added.scales,
        levels if added.outer is None else added.outer,
        levels,
        *index,
        kernel=kernel,
        code_layout=_integers(format.bits, _exponent_bits[format.float8], run),
        scale_types=stored.types,
        offset_types=_integers() if offsets is None else added.types,
        shift=np.float32(product.shift),
        rounds_x=rounds,
        level_unit=np.float32(_level_unit(format)),
        contract_rows=product.contract_rows,
        own_scales=own_scales,
    )
    if x_unit is not None:
        out = out * x_unit
    return out.astype(product.out_dtype)


class _Stored(NamedTuple):
    """Scales as the kernels read them: `scales` times, for each `outer_blocks` blocks,
    one of `outer`."""

    scales: Array
    type: int
    outer: Array | None = None
    outer_type: int = 0
    outer_blocks: int = 0

    @property
    def types(self) -> np.ndarray:
        return _integers(self.type, self.outer_type, self.outer_blocks)


def _integers(*values: int) -> np.ndarray:
    # As one attribute, because the handler decodes each attribute in each call.
    return np.array(values, np.int64)


def _is_decoded(scales: Any) -> bool:
    return isinstance(scales, FourBitScales)


def _stored(scales: Any) -> _Stored:
    if isinstance(scales, PowerOfTwoScales):
        return _Stored(scales.exponents, _exponent)
    if isinstance(scales, Float8Scales):
        return _Stored(scales.codes, _float8, scales.units, 0, scales.shape[-1])
    if isinstance(scales, QuantizedScales):
        type = _integer_types[scales.codes.dtype.name]
        return _Stored(scales.codes, type, scales.exponents, _exponent, GROUP)
    if isinstance(scales, IntegerScales) and not _is_decoded(scales):
        type, outer_type = (
            _integer_types[scales.codes.dtype.name],
            _scale_types["float16"],
        )
        return _Stored(scales.codes, type, scales.units, outer_type, scales.group)
    scales = float_scales(scales)
    return _Stored(scales, _scale_types[scales.dtype.name])


def run_of(product: Product) -> int:
    """Return how many consecutive bytes of a row hold the codes of one plane."""
    format = product.format
    if format.bits == 8:
        return product.packed
    return format.group * unpacked_bits(format) // 8


def row_bytes(product: Product) -> int:
    """Return the bytes of a row in the kernels."""
    return product.packed * unpacked_bits(product.format) // product.format.bits


def unpacked_bits(format: Format) -> int:
    """Return the bits of a code as the kernels read it. They unpack three bits to four,
    five and six bits to eight, and codes with a history to int8 levels. Two bits in
    blocks of 16 become four bits, because four bytes are shorter than a register."""
    if format.history:
        return 8
    if format.bits == 2 and format.group == 16:
        return 4
    return {3: 4, 5: 8, 6: 8}.get(format.bits, format.bits)


def _levels(format: Format) -> Float[Array, " levels"]:
    """Return the level of each 4-bit value. A narrower code is the lowest bits. With a
    history, return the levels of the linear table, and its masks."""
    if format.history:
        return jnp.asarray(_linear_table(format))
    if unpacked_bits(format) == 8:
        # Such codes need no table. Its values differ, because XLA would compile a
        # kernel that fills a constant one.
        return jnp.asarray(np.eye(1, 16, dtype=np.float32)[0])
    if type(format).levels is Format.levels:  # Fast to trace.
        return jnp.asarray(np.resize(np.asarray(format.codebook, np.float32), 16))
    codes = jnp.arange(16, dtype=jnp.uint8) & jnp.uint8(2**format.bits - 1)
    return format.levels(codes, jnp.float32)


@ft.cache
def _linear_table(format: Format) -> np.ndarray:
    """Return `LinearTable` of `src/decode/states.h` as numbers."""
    table = np.zeros(_most_levels + _most_masks, np.float32)
    linear = format.linear_table
    assert linear is not None, format
    table[: len(linear.levels)] = linear.levels
    table[_most_levels:][: len(linear.masks)] = linear.masks
    return table


def has_int8_levels(format: Format) -> bool:
    """Return whether levels are integers of int8 times a number, which the kernels
    multiply exactly."""
    if format.float8 or format.codebook is None:
        return format.integer_levels
    largest = max(map(abs, map(float, format.codebook)))
    return largest <= 127 * _level_unit(format)


@ft.cache
def has_small_levels(format: Format) -> bool:
    """Return whether 16 bits hold the sum of the products of two bytes of codes with
    activations in int8, if the kernels shift the lowest level to zero."""
    if not has_int8_levels(format) or format.float8 or unpacked_bits(format) == 8:
        return False
    levels = apart(lambda: np.asarray(_levels(format)))
    span = (np.max(levels) - min(np.min(levels), 0)) / _level_unit(format)
    codes_of_byte = 8 // unpacked_bits(format)
    return round(span) * 2 * 127 * codes_of_byte < 2**15


def _level_unit(format: Format) -> float:
    """Return a number whose multiples are close to all levels, or 0 if unknown."""
    if format.integer_levels:
        return 1.0
    if format.codebook is None or type(format).levels is not Format.levels:
        return 0.0
    return _unit_of(tuple(map(float, format.codebook)))


@ft.cache
def _unit_of(levels: tuple[float, ...]) -> float:
    """Return the best number to round all levels to multiples of.

    It is a whole fraction of the largest level if int8 holds all levels. Otherwise it
    is at least a 2**14th of the largest level, and changes the levels and their mean
    least.
    """
    table = np.asarray(levels)
    largest = np.max(np.abs(table))
    if not 0 < largest < np.inf:
        return 0.0
    for parts in range(1, 128):
        if np.all(table * (parts / largest) % 1 == 0):
            return float(largest / parts)
    units = largest / np.arange(2**13, 2**14)[:, None]
    errors = np.round(table / units) * units - table
    worst = np.square(errors).mean(-1) + 2**8 * np.square(errors.mean(-1))
    return float(units[np.argmin(worst), 0])
