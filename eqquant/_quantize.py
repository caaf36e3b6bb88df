"""Floats to quantized arrays and back."""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int8, Num, Shaped, UInt8

from ._array import QuantizedArray
from ._compat import config, explicit_mesh_of, is_traced, match_varying, spec_of
from ._pack import codes_per_byte, pack
from ._pipeline import pipeline
from ._typing import typed
from .formats import as_format, Format
from .formats._format import reduce_blocks
from .kernels import cpu


@typed
def quantize(
    array: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    format: Format | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    check_finite: bool = True,
) -> QuantizedArray:
    """Quantize an array.

    A pure function, which works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (512, 256))
        quantized = eqquant.quantize(weight, "nf4")
        assert quantized.shape == (512, 256)
        assert quantized.nbytes < weight.nbytes / 7
        ```

    **Arguments:**

    - `array`: a floating-point array with one axis or more.
    - `format`: a format, or the name of one: `"nf4"`, `"int8"`, `"ternary"`,
        `"binary"`.
    - `axis`: the axis along which blocks, or the scale of a channel, run. Normally the
        one that a product contracts: the last of a weight used as `w @ x`, as in
        `eqx.nn`; the first of one used as `x @ w`. With several axes, scales are shared
        over all of them, as the weight of a convolution needs; with all axes and no
        block size there is one scale per tensor.
    - `check_finite`: raise an error if `array` holds a NaN or an infinity, or values
        that the dtype of the scales cannot hold.

    **Returns:**

    A [`eqquant.QuantizedArray`][] of the shape and dtype of `array`.

    **Raises:**

    - `TypeError` if `array` is not floating point.
    - `ValueError` if `format` or `axis` is not valid, or (with the number of offending
        values) if `array` has non-finite ones. Under `jit` the latter is an
        `eqx.error_if`, raised at run time.
    """
    format = as_format(format)
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"quantize: array must have a floating-point dtype, got {array.dtype}."
        )
    if array.ndim == 0:
        raise ValueError("quantize: array must have at least one axis, got a scalar.")
    if format.scale_dtype == np.float64 and not config("jax_enable_x64"):
        raise ValueError(
            "quantize: scale_dtype='float64' needs jax_enable_x64, which is off."
        )
    axes = _canonical_axes(axis, array.ndim)
    if not array.size:
        axes = axes[-1:]  # Nothing shares a scale; and shape stays what can be derived.
    if not is_traced(array) and cpu.encodes(array, format, axes):
        codes, scales, problem = cpu.encode(array, format=format)
    else:
        on_one = _is_on_one_device(array)
        codes, scales, problem = _encode(array, format, axes, on_one)
    if check_finite:
        if is_traced(problem):
            # By way of a scalar: what passes through `error_if` itself is no longer
            # split over devices.
            zero = eqx.error_if(
                jnp.zeros((), scales.dtype),
                problem,
                "eqquant.quantize: the array holds values that are not finite, or that "
                f"{format.scale_dtype.name} scales cannot hold.",
            )
            scales = scales + zero
        elif problem:
            _raise_not_finite(array, format)
    shape = array.shape
    inner = tuple(shape[a] for a in axes[1:])
    if _per_tensor(axes, array.ndim, format):
        axes, inner = axes[-1:], ()
    size = math.prod(shape[a] for a in axes)
    padding = format.padded(size) - size
    return QuantizedArray(codes, scales, format, array.dtype, axes, inner, padding)


@typed
def dequantize(x: Any) -> Any:
    """The floating-point array that a quantized array stands for; anything else comes
    back as it is."""
    return x.dequantize() if isinstance(x, QuantizedArray) else x


@typed
def from_components(
    codes: UInt8[Array, "*lead packed"] | Int8[Array, "*lead packed"],
    scales: Float[Array, "*lead blocks"],
    format: Format | str,
    *,
    dtype: Any = "float32",
    axis: int | Sequence[int] = -1,
    size: int | Sequence[int] | None = None,
) -> QuantizedArray:
    """A quantized array from its parts, as a loader of checkpoints has them.

    **Arguments:**

    - `codes`: `(*lead, packed)`, packed as `format` packs them.
    - `scales`: `(*lead, blocks)`, of the `scale_dtype` of the format.
    - `format`: a format, or the name of one.
    - `dtype`: of the array that they stand for.
    - `axis`: where the blocked axis (or axes) of that array is.
    - `size`: the length of the blocked axis; a tuple if there are several. By default,
        for one axis, all that `codes` holds.

    **Returns:**

    A [`eqquant.QuantizedArray`][].

    **Raises:**

    `TypeError` or `ValueError` where the parts do not fit together.
    """
    format = as_format(format)
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"from_components: dtype must be floating point, got {dtype}.")
    if codes.dtype != format.code_dtype:
        raise TypeError(
            f"from_components: codes of {format!r} must be "
            f"{jnp.dtype(format.code_dtype)}, got {codes.dtype}."
        )
    if scales.dtype != format.scale_dtype:
        raise TypeError(
            f"from_components: scales must be {format.scale_dtype} as {format!r} has "
            f"it, got {scales.dtype}."
        )
    count = 1 if isinstance(axis, int) else len(axis)
    axes = _canonical_axes(axis, codes.ndim - 1 + count)
    held = codes.shape[-1] * codes_per_byte(format.bits)
    if size is None:
        if count > 1:
            raise ValueError("from_components: several axes need their sizes in size.")
        size = held
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if len(sizes) != count:
        raise ValueError(
            f"from_components: size must give {count} sizes, one for each of axis, got "
            f"{size}."
        )
    total = math.prod(sizes)
    if held != format.padded(total):
        raise ValueError(
            f"from_components: codes hold {held} values along the blocked axis, but "
            f"{format!r} stores {format.padded(total)} for a size of {size}."
        )
    blocks = format.num_blocks(total)
    if scales.shape[-1] != blocks:
        raise ValueError(
            f"from_components: scales must have {blocks} blocks for a size of {size}, "
            f"got {scales.shape[-1]}."
        )
    padding = held - total
    return QuantizedArray(codes, scales, format, dtype, axes, sizes[1:], padding)


def _canonical_axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Sorted, counted from the end, and checked."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(
                f"axis must be between {-ndim} and {ndim - 1} for an array of {ndim} "
                f"axes, got {axis}."
            )
    out = tuple(sorted(a % ndim - ndim for a in axes))
    if not out or len(set(out)) != len(out):
        raise ValueError(f"axis must name one axis or several distinct, got {axis}.")
    return out


def _is_on_one_device(array: Array) -> bool:
    # A loop over rows that are split over devices would gather them.
    if is_traced(array):
        return jax.device_count() == 1
    return len(array.sharding.device_set) == 1


def _per_tensor(axes: tuple[int, ...], ndim: int, format: Format) -> bool:
    # One scale for everything. It is stored once per row, so that the array keeps its
    # leading axes, and a product its fast path.
    return ndim > 1 and len(axes) == ndim and format.block_size is None


@ft.partial(jax.jit, static_argnames=("format", "axes", "chunked"))
def _encode(
    array: Float[Array, "..."], format: Format, axes: tuple[int, ...], chunked: bool
):
    """Codes, scales, and whether some value was out of range."""
    blocked = [a % array.ndim for a in axes]
    lead = [a for a in range(array.ndim) if a not in blocked]
    shape = [array.shape[a] for a in lead]
    size = math.prod(array.shape[a] for a in blocked)
    rows = jnp.transpose(array, (*lead, *blocked)).reshape(*shape, size)
    if 0 in rows.shape:
        packed = format.padded(size) * format.bits // 8
        codes = jnp.zeros((*shape, packed), format.code_dtype)
        scales = jnp.zeros((*shape, format.num_blocks(size)), format.scale_dtype)
        return codes, scales, jnp.zeros((), bool)

    compute = jnp.promote_types(array.dtype, jnp.float32)
    limit = float(jnp.finfo(array.dtype).max)
    per_tensor = _per_tensor(axes, array.ndim, format)

    def encode(row: Float[Array, " size"]):
        blocks, counts = _in_blocks(row.astype(compute), format)
        absmax = _absmax(blocks)
        codes, scales = format.encode(blocks, absmax, counts, limit)
        codes = codes.astype(format.code_dtype)
        if per_tensor:
            codes = codes.reshape(array.shape)
        codes = _in_groups(codes, format)
        return pack(codes, format.bits), scales, _out_of_range(absmax, format)

    if chunked:
        # A chunk at a time keeps temporaries in the cache, and as small as that.
        rows = rows.reshape(-1, size)
        height = max(1, _chunk_elements // size)
        codes, scales, problem = _map_chunks(jax.vmap(encode), rows, height)
    else:
        # Axis by axis: to flatten them would gather what is split over devices.
        for _ in lead:
            encode = jax.vmap(encode)
        codes, scales, problem = _keep_split(encode, rows, format)
    if per_tensor:
        shape = array.shape[:-1]
        scales = jnp.broadcast_to(scales.reshape(1), (math.prod(shape), 1))
    codes = codes.reshape(*shape, -1)
    return codes, scales.reshape(*shape, -1), jnp.any(problem)


def _keep_split(encode: Callable, rows: Shaped[Array, "*lead size"], format: Format):
    """`encode(rows)`. On a mesh with explicit axes the results are split as `rows` are,
    and the compiler sees to what is in between."""
    mesh = explicit_mesh_of(rows)
    if mesh is None:
        return encode(rows)
    *lead, last = spec_of(rows)
    *shape, size = rows.shape

    def spec(length: int) -> PartitionSpec:
        names = last if isinstance(last, tuple) else () if last is None else (last,)
        even = length % math.prod(mesh.shape[name] for name in names) == 0
        return PartitionSpec(*lead, last if even else None)

    def flat(rows):
        codes, scales, problem = encode(rows)
        return codes.reshape(*shape, -1), scales.reshape(*shape, -1), problem

    packed = format.padded(size) * format.bits // 8
    out = (spec(packed), spec(format.num_blocks(size)), PartitionSpec(*lead))
    with jax.sharding.use_abstract_mesh(mesh):
        split: Any = jax.sharding.auto_axes(flat, out_sharding=out)
        return split(rows)


def _map_chunks(fn: Callable, rows: Shaped[Array, "rows size"], height: int):
    """`fn(rows)`, so many rows at a time, each result flattened but for its rows."""
    count, rest = divmod(rows.shape[0], height)

    def chunk(i):
        return fn(lax.dynamic_slice_in_dim(rows, i * height, height))

    def write(i, chunk, out):
        # The reshape is here, as XLA:CPU would fuse it with the encoding, and no longer
        # vectorise that.
        return jax.tree.map(
            lambda out, part: lax.dynamic_update_slice_in_dim(
                out, part.reshape(part.shape[0], -1), i * height, 0
            ),
            out,
            chunk,
        )

    def empty(part):
        out = jnp.zeros((rows.shape[0], math.prod(part.shape[1:])), part.dtype)
        return match_varying(out, rows)[0]

    out = jax.tree.map(empty, jax.eval_shape(fn, rows))
    if count:
        out = pipeline(count, chunk, write, out)
    return write(count, fn(rows[-rest:]), out) if rest else out


# What is encoded at once: four megabytes of float32.
_chunk_elements = 2**20


def _in_blocks(
    row: Float[Array, " size"], format: Format
) -> tuple[Float[Array, "blocks block"], Float[np.ndarray, " blocks"]]:
    """The row cut in blocks, the last one filled with zeros; and how much of each block
    is real."""
    (size,) = row.shape
    blocks, block = format.num_blocks(size), format.block_size or size
    filled = blocks * block - size
    counts = np.full(blocks, block, np.float32)
    counts[-1] -= filled
    return jnp.pad(row, (0, filled)).reshape(blocks, block), counts


def _in_groups(
    codes: Shaped[Array, "*lead size"], format: Format
) -> Shaped[Array, "... groups group"]:
    """The codes of one row (or of several, for one scale per tensor) cut in the groups
    that are packed together."""
    if format.block_size is not None:
        return codes
    *lead, size = codes.shape
    filled = format.padded(size) - size
    if filled:
        widths = [(0, 0)] * len(lead) + [(0, filled)]
        codes = jnp.pad(codes, widths, constant_values=format.padding_code)
    if format.group == 1:
        return codes
    return codes.reshape(*lead, -1, format.group)


def _absmax(blocks: Float[Array, "*lead size"]) -> Float[Array, "*lead"]:
    """The largest magnitude; infinite if anything is not finite."""
    # XLA:CPU's maximum may drop a NaN, but not an infinity.
    magnitude = jnp.where(blocks == blocks, jnp.abs(blocks), jnp.inf)
    return reduce_blocks(jnp.max, magnitude)


def _out_of_range(absmax: Float[Array, "*lead"], format: Format) -> Bool[Array, ""]:
    """Whether some value is not finite, or not one that scales can hold."""
    fits = jnp.isfinite(absmax)
    scales = jnp.finfo(format.scale_dtype)
    if jnp.finfo(absmax.dtype).maxexp > scales.maxexp:
        largest, smallest = float(scales.max), float(scales.tiny)
        fits &= (absmax <= largest) & ((absmax >= smallest) | (absmax == 0))
    return jnp.any(~fits)


def _raise_not_finite(array: Num[Array, "..."], format: Format):
    nan = int(jnp.sum(jnp.isnan(array)))
    infinite = int(jnp.sum(jnp.isinf(array)))
    if nan or infinite:
        raise ValueError(
            f"quantize: array must be finite, but {nan} values are NaN and {infinite} "
            f"are infinite, out of {array.size}. Pass check_finite=False to quantize "
            "it all the same."
        )
    raise ValueError(
        f"quantize: array holds values that scales in {format.scale_dtype.name} cannot "
        "hold. Choose scale_dtype='float64', or rescale the array."
    )
