"""The contract of formats, checked once for each format of another package."""

import functools as ft
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._format import Format
from ._scales import float_scales, scales_and_offsets


_bits = (1, 2, 3, 4, 5, 6, 8)
_contract = (
    "`encode` returns a pair (codes, scales): codes are integers, one per value, and "
    "scales have the dtype `scale_dtype`, one per block (a tuple with offsets for an "
    "affine format). `levels` returns one value per code. See `eqquant.formats.Format`."
)


@ft.cache
def check_contract(format: Format) -> None:
    """Raise an error if a format violates the contract, on a small array.

    The formats of eqquant have tests instead.
    """
    if type(format).__module__.partition(".")[0] == "eqquant":
        return
    with jax.ensure_compile_time_eval():
        if problem := problem_of(format):
            raise TypeError(f"{format!r}: {problem} The contract: {_contract}")


def problem_of(format: Format) -> str | None:
    """Return a sentence about the first part of the contract that is violated."""
    if format.bits not in _bits:
        return f"bits is {format.bits}, but must be one of {_bits}."
    if not isinstance(name := getattr(format, "name", None), str):
        return f"name is {name!r}, but must be a str."
    count, codebook = 2**format.bits, format.codebook
    if codebook is None and type(format).levels is Format.levels:
        return "it has neither a codebook nor a method levels."
    if codebook is not None and not all(isinstance(x, numbers.Real) for x in codebook):
        return f"codebook must be a tuple of numbers, got {codebook!r}."
    if codebook is not None and len(codebook) != count:
        return f"codebook has {len(codebook)} levels, but must have {count}."
    return _problem_of_shapes(format) or _problem_of_values(format)


def _levels(format: Format) -> Any:
    codes = np.arange(2**format.bits, dtype="uint8").astype(format.code_dtype)
    return format.levels(jnp.asarray(codes), np.dtype("float32"))


def _encoded(format: Format) -> Any:
    size = format.block_size or 4 * format.group
    values = np.random.default_rng(0).standard_normal((3, 2, size))
    blocks = jnp.asarray(values.astype("float32"))
    absmax = jnp.max(jnp.abs(blocks), -1)
    counts = np.full(2, size, "float32")
    result = format.encode(blocks, absmax, counts, float(np.finfo("float32").max))
    return blocks, result


def _nearest(format: Format, blocks: Any, parts: Any) -> Any:
    if type(format).nearest is Format.nearest:
        return None
    scales, _ = scales_and_offsets(parts, format)
    return format.nearest(blocks, float_scales(scales).astype(blocks.dtype))


def _problem_of_shapes(format: Format) -> str | None:
    levels = jax.eval_shape(lambda: _levels(format))
    if problem := _differs("levels", levels, (2**format.bits,), "float32"):
        return problem
    blocks, result = jax.eval_shape(lambda: _encoded(format))
    if not isinstance(result, tuple) or len(result) != 2:
        returned = f"{len(result)} values" if isinstance(result, tuple) else "one value"
        return f"encode returned {returned}, but must return (codes, scales)."
    codes, parts = result
    like = jax.eval_shape(lambda: format.no_scales((3,), 2 * blocks.shape[-1]))
    if jax.tree.structure(parts) != jax.tree.structure(like):
        return (
            f"encode returned scales with the structure {jax.tree.structure(parts)}, "
            f"but no_scales has {jax.tree.structure(like)}."
        )
    if problem := _differs("codes of encode", codes, blocks.shape):
        return problem
    for part, expected in zip(*map(jax.tree.leaves, (parts, like)), strict=True):
        # Without a block size, `encode` is called here with two blocks per row.
        shape = expected.shape if format.block_size else (*expected.shape[:-1], 2)
        if problem := _differs("scales of encode", part, shape, expected.dtype):
            return problem
    nearest = jax.eval_shape(lambda *args: _nearest(format, *args), blocks, parts)
    return nearest and _differs("codes of nearest", nearest, blocks.shape)


def _problem_of_values(format: Format) -> str | None:
    @jax.jit  # One program, because single operations compile slowly.
    def results():
        blocks, (codes, parts) = _encoded(format)
        found = {"encode": codes, "nearest": _nearest(format, blocks, parts)}
        ranges = {
            name: (jnp.min(codes), jnp.max(codes))
            for name, codes in found.items()
            if codes is not None
        }
        levels = format.levels(codes.astype(format.code_dtype), np.dtype("float32"))
        return levels, ranges

    levels, ranges = results()
    info = jnp.iinfo(format.code_dtype)
    last = 2**format.bits - 1 if info.min == 0 else info.max
    if not info.min <= format.padding_code <= last:
        return f"padding_code is {format.padding_code}, but must be up to {last}."
    for name, (lowest, highest) in ranges.items():
        if lowest < info.min or highest > last:
            return (
                f"{name} returned codes from {lowest} to {highest}, but {format.bits} "
                f"bits hold {info.min} to {last}."
            )
    largest = jnp.max(jnp.abs(levels))
    if not largest <= np.float32(format.largest_level):
        return (
            f"a level has the magnitude {largest}, but largest_level is "
            f"{format.largest_level}."
        )
    if format.integer_levels and jnp.any(levels != jnp.round(levels)):
        return "integer_levels is true, but some levels are not integers."
    if format.unit_levels and not jnp.isin(levels, np.array([-1, 0, 1])).all():
        return "unit_levels is true, but some levels are not -1, 0 or 1."
    return None


def _differs(name: str, x: Any, shape: tuple, dtype: Any = None) -> str | None:
    """Compare with a shape and a dtype, by default any integer."""
    if not hasattr(x, "dtype"):
        return f"{name} is {x!r}, but must be an array."
    is_right = (
        jnp.issubdtype(x.dtype, jnp.integer) if dtype is None else x.dtype == dtype
    )
    if x.shape == tuple(shape) and is_right:
        return None
    wanted = "an integer dtype" if dtype is None else jnp.dtype(dtype)
    return (
        f"{name} has the dtype {x.dtype} and the shape {x.shape}, but must have "
        f"{wanted} and {tuple(shape)}."
    )
