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
from .formats import as_format, Format, QuantizedScales
from .formats._format import reduce_blocks
from .kernels import cpu


@typed
def quantize(
    array: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    format: Format | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    scales: Float[Array, "*lead blocks"] | None = None,
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
    - `scales`: `(*lead, blocks)`, positive: scales that were learned or calibrated, to
        use instead of those that the format would choose. Every value takes its nearest
        level. `lead` are the axes of `array` that are not blocked.
    - `check_finite`: raise an error if `array` holds a NaN or an infinity, or values
        that the dtype of the scales cannot hold.

    **Returns:**

    A [`eqquant.QuantizedArray`][] of the shape and dtype of `array`.

    **Raises:**

    - `TypeError` if `array` is not floating point.
    - `ValueError` if `format`, `axis` or the shape of `scales` is not valid, or (with
        the number of offending values) if `array` has non-finite ones. Under `jit` the
        latter is an `eqx.error_if`, raised at run time.
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
    given = None
    if scales is not None:
        _check_scales(scales, array, axes, format)
        given = scales.astype(format.scale_dtype)
    if given is None and not is_traced(array) and cpu.encodes(array, format, axes):
        codes, stored, problem = cpu.encode(array, format=format)
    else:
        on_one = _is_on_one_device(array)
        codes, stored, problem = _encode(array, format, axes, on_one, given)
    if check_finite:
        if is_traced(problem):
            # By way of a scalar: what passes through `error_if` itself is no longer
            # split over devices.
            zero = eqx.error_if(
                jnp.zeros((), stored.dtype),
                problem,
                "eqquant.quantize: the array holds values that are not finite, or that "
                f"{format.scale_dtype.name} scales cannot hold; or a scale that was "
                "given is not positive and finite.",
            )
            stored = jax.tree.map(lambda a: a + zero.astype(a.dtype), stored)
        elif problem:
            _raise_not_finite(array, given, format)
    shape = array.shape
    inner = tuple(shape[a] for a in axes[1:])
    if _per_tensor(axes, array.ndim, format):
        axes, inner = axes[-1:], ()
    size = math.prod(shape[a] for a in axes)
    padding = format.padded(size) - size
    return QuantizedArray(codes, stored, format, array.dtype, axes, inner, padding)


@typed
def dequantize(x: Any) -> Any:
    """The floating-point array that a quantized array stands for; anything else comes
    back as it is."""
    return x.dequantize() if isinstance(x, QuantizedArray) else x


@typed
def from_components(
    codes: UInt8[Array, "*lead packed"] | Int8[Array, "*lead packed"],
    scales: Float[Array, "*lead blocks"] | QuantizedScales,
    format: Format | str,
    *,
    dtype: Any = "float32",
    axis: int | Sequence[int] = -1,
    size: int | Sequence[int] | None = None,
) -> QuantizedArray:
    """A quantized array from its parts, as a loader of checkpoints has them.

    **Arguments:**

    - `codes`: `(*lead, packed)`, packed as `format` packs them.
    - `scales`: `(*lead, blocks)`, of the `scale_dtype` of the format; for a format that
        quantizes them an [`eqquant.QuantizedScales`][].
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
    if format.quantized_scales != isinstance(scales, QuantizedScales):
        kind = "eqquant.QuantizedScales" if format.quantized_scales else "an array"
        raise TypeError(f"from_components: scales of {format!r} must be {kind}.")
    if scales.shape[:-1] != codes.shape[:-1]:
        raise ValueError(
            f"from_components: scales must have the leading axes {codes.shape[:-1]} of "
            f"codes, got {scales.shape[:-1]}."
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
    array: Float[Array, "..."],
    format: Format,
    axes: tuple[int, ...],
    chunked: bool,
    given: Float[Array, "*lead blocks"] | None = None,
):
    """Codes, scales (those given, or those of the format), and whether some value was
    out of range."""
    blocked = [a % array.ndim for a in axes]
    lead = [a for a in range(array.ndim) if a not in blocked]
    shape = [array.shape[a] for a in lead]
    size = math.prod(array.shape[a] for a in blocked)
    rows = jnp.transpose(array, (*lead, *blocked)).reshape(*shape, size)
    if 0 in rows.shape:
        packed = format.padded(size) * format.bits // 8
        codes = jnp.zeros((*shape, packed), format.code_dtype)
        return codes, format.no_scales(shape, size), jnp.zeros((), bool)

    compute = jnp.promote_types(array.dtype, jnp.float32)
    limit = float(jnp.finfo(array.dtype).max)
    per_tensor = _per_tensor(axes, array.ndim, format)

    def encode(inputs):
        row, scales = inputs
        blocks, counts = _in_blocks(row.astype(compute), format)
        absmax = _absmax(blocks)
        problem = _out_of_range(absmax, format)
        if scales is None:
            codes, scales = format.encode(blocks, absmax, counts, limit)
        else:
            codes = format.nearest(blocks, scales)
            problem |= ~jnp.all(_is_a_scale(scales))
        codes = codes.astype(format.code_dtype)
        if per_tensor:
            codes = codes.reshape(array.shape)
        codes = _in_groups(codes, format)
        return pack(codes, format.bits), scales, problem

    if chunked:
        # A chunk at a time keeps temporaries in the cache, and as small as that.
        inputs = rows.reshape(-1, size), _merge_lead(given)
        height = max(1, _chunk_elements // size)
        codes, scales, problem = _map_chunks(jax.vmap(encode), inputs, height)
    else:
        # Axis by axis: to flatten them would gather what is split over devices.
        for _ in lead:
            encode = jax.vmap(encode)
        codes, scales, problem = _keep_split(encode, (rows, given), format)
    if per_tensor:
        shape = array.shape[:-1]
        scales = jnp.broadcast_to(scales.reshape(1), (math.prod(shape), 1))
    codes = codes.reshape(*shape, -1)
    scales = jax.tree.map(lambda a: a.reshape(*shape, -1), scales)
    return codes, scales, jnp.any(problem)


def _merge_lead(given: Float[Array, "*lead blocks"] | None):
    return None if given is None else given.reshape(-1, given.shape[-1])


def _keep_split(encode: Callable, inputs: tuple, format: Format):
    """`encode(inputs)`. On a mesh with explicit axes the results are split as the rows
    are, which come first, and the compiler sees to what is in between."""
    rows, _ = inputs
    mesh = explicit_mesh_of(rows)
    if mesh is None:
        return encode(inputs)
    *lead, last = spec_of(rows)
    *shape, size = rows.shape

    def spec(length: int) -> PartitionSpec:
        names = last if isinstance(last, tuple) else () if last is None else (last,)
        even = length % math.prod(mesh.shape[name] for name in names) == 0
        return PartitionSpec(*lead, last if even else None)

    def flat(inputs):
        codes, scales, problem = encode(inputs)
        codes, scales = jax.tree.map(lambda a: a.reshape(*shape, -1), (codes, scales))
        return codes, scales, problem

    packed = format.padded(size) * format.bits // 8
    scales = jax.eval_shape(lambda: format.no_scales((), size))
    scales = jax.tree.map(lambda a: spec(a.shape[-1]), scales)
    out = (spec(packed), scales, PartitionSpec(*lead))
    with jax.sharding.use_abstract_mesh(mesh):
        split: Any = jax.sharding.auto_axes(flat, out_sharding=out)
        return split(inputs)


def _map_chunks(fn: Callable, inputs: tuple, height: int):
    """`fn(inputs)`, so many rows at a time, each result flattened but for its rows."""
    size = jax.tree.leaves(inputs)[0].shape[0]
    count, rest = divmod(size, height)

    def chunk(i):
        return fn(
            jax.tree.map(
                lambda a: lax.dynamic_slice_in_dim(a, i * height, height), inputs
            )
        )

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
        out = jnp.zeros((size, math.prod(part.shape[1:])), part.dtype)
        return match_varying(out, *jax.tree.leaves(inputs))[0]

    out = jax.tree.map(empty, jax.eval_shape(fn, inputs))
    if count:
        out = pipeline(count, chunk, write, out)
    if not rest:
        return out
    return write(count, fn(jax.tree.map(lambda a: a[-rest:], inputs)), out)


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


def _check_scales(
    scales: Float[Array, "*lead blocks"], array, axes: tuple[int, ...], format: Format
):
    if format.quantized_scales:
        raise ValueError(
            f"quantize: scales cannot be given to {format!r}, which quantizes them. "
            "Turn that off."
        )
    blocked = [a % array.ndim for a in axes]
    lead = [n for a, n in enumerate(array.shape) if a not in blocked]
    size = math.prod(array.shape[a] for a in blocked)
    expected = (*lead, format.num_blocks(size))
    if scales.shape != expected:
        raise ValueError(
            f"quantize: scales must have the shape {expected} for an array of shape "
            f"{array.shape} in {format!r}, got {scales.shape}."
        )


def _is_a_scale(given: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    return (given > 0) & jnp.isfinite(given)


def _raise_not_finite(
    array: Num[Array, "..."],
    given: Float[Array, "*lead blocks"] | None,
    format: Format,
):
    nan = int(jnp.sum(jnp.isnan(array)))
    infinite = int(jnp.sum(jnp.isinf(array)))
    if nan or infinite:
        raise ValueError(
            f"quantize: array must be finite, but {nan} values are NaN and {infinite} "
            f"are infinite, out of {array.size}. Pass check_finite=False to quantize "
            "it all the same."
        )
    if given is not None and (
        wrong := int(jnp.sum(~((given > 0) & (given < jnp.inf))))
    ):
        raise ValueError(
            f"quantize: scales must be positive and finite, but {wrong} out of "
            f"{given.size} are not."
        )
    raise ValueError(
        f"quantize: array holds values that scales in {format.scale_dtype.name} cannot "
        "hold. Choose scale_dtype='float64', or rescale the array."
    )
