"""The encoding of floats as codes and scales, which `quantize` compiles."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from ..._jax import match_varying, pipeline, platform_of, rowwise, wide_dtype
from ...formats import Format, max_blocks, num_bytes, scales_and_offsets
from ...kernels import cpu
from ...partition import has_explicit_split, spec_like, split_by_compiler
from .._matrices import other_axes


def per_tensor(axes: tuple[int, ...], ndim: int, format: Format) -> bool:
    # One scale for the whole array. It is stored once per row, so that scales have the
    # leading axes, and products use their fast path.
    return ndim > 1 and len(axes) == ndim and format.block_size is None


@ft.partial(jax.jit, static_argnames=("format", "axes", "at_once"))
def encode_rows(
    array: Float[Array, "..."],
    format: Format,
    axes: tuple[int, ...],
    at_once: int | None,
    given: Any = None,
):
    """Like [`encode_each_row`][], but with one flag, and compiled as one program."""
    *out, problems = encode_each_row(array, format, axes, at_once, given)
    return *out, jnp.any(problems)


def encode_each_row(
    array: Float[Array, "..."],
    format: Format,
    axes: tuple[int, ...],
    at_once: int | None,
    given: Any = None,
):
    """Return codes, scales, and for each row whether some value was out of range.

    Scales are the given scales or chosen by the format; for affine formats they are a
    tuple with offsets. `at_once` limits the number of elements per step; None for all.
    """
    blocked = [a % array.ndim for a in axes]
    lead = other_axes(array.ndim, axes)
    shape = [array.shape[a] for a in lead]
    size = math.prod(array.shape[a] for a in blocked)
    rows = jnp.transpose(array, (*lead, *blocked)).reshape(*shape, size)
    if 0 in rows.shape:
        packed = num_bytes(format.padded(size), format.bits)
        codes = jnp.zeros((*shape, packed), format.code_dtype)
        return codes, format.no_scales(shape, size), jnp.zeros(shape, bool)

    compute = wide_dtype(array.dtype)
    limit = float(jnp.finfo(array.dtype).max)
    one_scale = per_tensor(axes, array.ndim, format)

    def encode(inputs):
        row, scales = inputs
        blocks, counts = in_blocks(row.astype(compute), format)
        absmax = _absmax(blocks)
        problem = _out_of_range(absmax, format)
        if scales is None:
            codes, scales = format.encode(blocks, absmax, counts, limit)
        else:
            plain, offsets = scales_and_offsets(scales, format)
            problem |= ~jnp.all(is_a_scale(plain, format))
            if offsets is not None:
                problem |= ~jnp.all(jnp.isfinite(offsets))
                blocks = blocks - offsets.astype(compute)[..., None]
            codes = format.nearest(blocks, plain)
        codes = codes.astype(format.code_dtype)
        if one_scale:
            codes = codes.reshape(array.shape)
        codes = _in_groups(codes, format)
        return format.pack(codes), scales, problem

    if at_once is not None:
        inputs = rows.reshape(-1, size), _merge_lead(given)
        height = max(1, at_once // size)
        codes, scales, problem = _map_chunks(jax.vmap(encode), inputs, height)
    else:
        # One axis at a time, because flattening would gather sharded axes.
        for _ in lead:
            encode = jax.vmap(encode)
        codes, scales, problem = _keep_split(encode, (rows, given), format)
    if one_scale:
        shape = array.shape[:-1]
        to_rows = lambda a: jnp.broadcast_to(a.reshape(1), (math.prod(shape), 1))
        scales = jax.tree.map(to_rows, scales)
    codes = codes.reshape(*shape, -1)
    scales = jax.tree.map(lambda a: a.reshape(*shape, -1), scales)
    return codes, scales, problem.reshape(-1 if one_scale else shape)


def has_encoder(
    array: Float[Array, "..."], format: Format, axes: tuple[int, ...]
) -> bool:
    """Return whether CPUs have a native encoder."""
    whole = not has_explicit_split(array)
    return axes == (-1,) and whole and cpu.encodes(array, format)


def _by_rows(array, format: Format, at_once: int | None):
    codes, scales, problem = encode_rows(array, format, (-1,), at_once)
    problems = jnp.broadcast_to(problem, array.shape[:-1])
    return jax.tree.leaves((codes, scales, problems))


def _native(array, format: Format, at_once: int | None):
    del at_once
    return jax.tree.leaves(cpu.encode(array, format=format))


_encode_rowwise = rowwise("encode", _by_rows, _native)


def encode_rowwise(
    array: Float[Array, "*lead size"], format: Format, at_once: int | None
):
    """Like [`encode_rows`][], but with a flag for each row."""
    codes, *scales, problems = _encode_rowwise(array, format, at_once)
    structure = jax.tree.structure(
        jax.eval_shape(lambda: format.no_scales((), array.shape[-1]))
    )
    return codes, jax.tree.unflatten(structure, scales), problems


def _merge_lead(given):
    return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), given)


def _keep_split(encode: Callable, inputs: tuple, format: Format):
    """Return `encode(inputs)`.

    On a mesh with explicit axes, the results are sharded like the rows, and the
    compiler chooses the intermediate shardings.
    """
    rows, _ = inputs
    if not has_explicit_split(rows):
        return encode(inputs)
    *shape, size = rows.shape
    spec = lambda length: spec_like(rows, (*shape, length))

    def flat(inputs):
        codes, scales, problem = encode(inputs)
        codes, scales = jax.tree.map(lambda a: a.reshape(*shape, -1), (codes, scales))
        return codes, scales, problem

    packed = num_bytes(format.padded(size), format.bits)
    scales = jax.eval_shape(lambda: format.no_scales((), size))
    scales = jax.tree.map(lambda a: spec(a.shape[-1]), scales)
    out = (spec(packed), scales, spec_like(rows, shape))
    return split_by_compiler(flat, rows, out)(inputs)


def _map_chunks(fn: Callable, inputs: tuple, height: int):
    """Return `fn(inputs)` in chunks of rows. Results are flattened except for rows."""
    size = jax.tree.leaves(inputs)[0].shape[0]
    count, rest = divmod(size, height)

    def chunk(i):
        return fn(
            jax.tree.map(
                lambda a: lax.dynamic_slice_in_dim(a, i * height, height), inputs
            )
        )

    def write(i, chunk, out):
        # Reshape here, because XLA:CPU would fuse it with the encoding, which would no
        # longer vectorise.
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

    last = None
    if rest:
        last = fn(jax.tree.map(lambda a: a[-rest:], inputs))
    out = jax.tree.map(empty, last if rest else jax.eval_shape(fn, inputs))
    if count:
        out = pipeline(count, chunk, write, out)
    return write(count, last, out) if rest else out


def elements_at_once(array: Array, format: Format) -> int:
    """Return the number of elements per step.

    On a CPU, 4 MB keep temporaries in cache. On a GPU, 256 MB make the launch overhead
    of kernels negligible. The encoder of codes with a history needs a byte for each
    element and each state before it. On a CPU, it is twice as fast with 8 MB as with
    1 MB, because a step then processes one column of 40 blocks.
    """
    is_gpu = platform_of(array) == "gpu"
    if format.history:
        return (2**26 if is_gpu else 2**23) >> format.code_bits * format.history
    return 2**26 if is_gpu else 2**20


def in_blocks(
    row: Float[Array, " size"], format: Format
) -> tuple[Float[Array, "blocks block"], Float[np.ndarray, " blocks"]]:
    """Cut rows into blocks, and pad the last block with zeros.

    Also return the number of original values in each block.
    """
    (size,) = row.shape
    blocks, block = format.num_blocks(size), format.block_size or size
    filled = blocks * block - size
    counts = np.clip(size - block * np.arange(blocks, dtype=np.float32), 0, block)
    return jnp.pad(row, (0, filled)).reshape(blocks, block), counts


def _in_groups(
    codes: Shaped[Array, "*lead size"], format: Format
) -> Shaped[Array, "... groups group"]:
    """Cut the codes of a row into groups for packing.

    With one scale per tensor, several rows count as one.
    """
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
    """Return the largest magnitude, or infinity if a value is not finite."""
    # The maximum of XLA:CPU may ignore a NaN, but not an infinity.
    magnitude = jnp.where(blocks == blocks, jnp.abs(blocks), jnp.inf)
    return max_blocks(magnitude)


def _out_of_range(absmax: Float[Array, "*lead"], format: Format) -> Bool[Array, ""]:
    """Return whether some value is not finite, or too large for the dtype of scales."""
    fits = jnp.isfinite(absmax)
    if format.has_offsets:  # Both a scaled level and an offset can have this magnitude.
        fits &= absmax <= float(jnp.finfo(format.scale_dtype).max) / 4
    scales = jnp.finfo(format.range_dtype)
    if jnp.finfo(absmax.dtype).maxexp > scales.maxexp:
        largest, smallest = float(scales.max), float(scales.tiny)
        fits &= (absmax <= largest) & ((absmax >= smallest) | (absmax == 0))
    return jnp.any(~fits)


def is_a_scale(given: Float[Array, "*shape"], format: Format) -> Bool[Array, "*shape"]:
    size = jnp.abs(given) if format.signed_scales else given
    return (size > 0) & jnp.isfinite(given)
