"""The product of two arrays of narrow numbers: int8, 8-bit floats or bfloat16.

XLA multiplies these natively on TPUs and GPUs. On TPUs with an int8 matrix unit, a
Pallas kernel multiplies int8 faster: by its own estimate, XLA reaches 0.6 of the peak
of v6e, and on v5e takes as long as in bfloat16 where it contracts rows with rows. On
CPUs the native kernels multiply int8. XLA:CPU converts both operands element by
element, or does not vectorise the product, which takes up to seven times as long as
float32.
"""

import dataclasses
import functools as ft
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Shaped

from .._jax import define_impl, is_automatically_partitioned, is_exported, match_varying
from ..formats import Int8
from ..kernels import choose, Compute, cpu, Matmul, xla
from ._batching import map_all_first


codes_dot_p = Primitive("codes_dot")
_matmul = Matmul(Int8(), compute=Compute(activations="int8"))


def codes_dot(
    a: Shaped[Array, "*stack _ _"],
    b: Shaped[Array, "*stack _ _"],
    over: tuple[int, int],
    scales: tuple[Array | None, Array | None] = (None, None),
    out_dtype: Any = jnp.float32,
) -> Float[Array, "*stack m n"]:
    """Contract axis `over[0]` of `a` with axis `over[1]` of `b`: each is -1 or -2.

    `scales` multiply the sums. They have one element along the contracted axis of their
    operand, and one or as many as the operand along the other.

    The products are exact. Sums are exact for int8, unless XLA:CPU computes them, and
    have float32 precision for floats. For int8, the largest magnitude of each row of
    `a` is 127, or all values are zero. There are no derivatives.
    """
    given = [
        scale if axis == -1 else jnp.swapaxes(scale, -1, -2)
        for scale, axis in zip(scales, over, strict=True)
        if scale is not None
    ]
    has = tuple(scale is not None for scale in scales)
    operands = match_varying(a, b, *given)
    dtype = jnp.dtype(out_dtype)
    return codes_dot_p.bind(*operands, over=over, has=has, out_dtype=dtype)


def _by_xla(a, b, *scales, over, has, out_dtype):
    return _scaled(_sums_by_xla(a, b, over), scales, has, out_dtype)


def _scaled(out, scales, has, out_dtype):
    """Multiply sums by the scales of their rows and columns."""
    left, right = _both(scales, has)
    out = out if left is None else out * left
    out = out if right is None else out * jnp.swapaxes(right, -1, -2)
    return out.astype(out_dtype)


def _both(scales, has):
    rest = iter(scales)
    return tuple(next(rest) if given else None for given in has)


def _sums_by_xla(a, b, over):
    is_int8 = a.dtype == jnp.int8
    size, longest = a.shape[over[0]], xla.longest_int8_sum
    if is_int8 and isinstance(size, int) and size > longest:
        starts = range(0, size, longest)
        part = lambda x, axis, i: lax.slice_in_dim(
            x, i, min(i + longest, size), axis=axis
        )
        first, last = over
        sums = (_sums_by_xla(part(a, first, i), part(b, last, i), over) for i in starts)
        return ft.reduce(operator.add, sums)
    dtype = jnp.int32 if is_int8 else jnp.float32
    return _dot(a, b, over, dtype).astype(jnp.float32)


def _dot(a, b, over, dtype):
    stack = tuple(range(a.ndim - 2))
    contracted: Any = tuple(
        (axis + x.ndim,) for x, axis in zip((a, b), over, strict=True)
    )
    return lax.dot_general(
        a,
        b,
        (contracted, (stack, stack)),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )


def _in_float32(a, b, *scales, over, has, out_dtype):
    out = _dot(a.astype(jnp.float32), b.astype(jnp.float32), over, jnp.float32)
    return _scaled(out, scales, has, out_dtype)


def _on_cpu(a, b, *scales, **static):
    library = cpu.load()
    if a.dtype == jnp.bfloat16 == b.dtype and getattr(library, "bfloat16", False):
        return _by_xla(a, b, *scales, **static)
    if a.dtype != jnp.int8:
        return _in_float32(a, b, *scales, **static)
    over = static["over"]
    ones = jnp.ones((*b.shape[:-2], b.shape[-3 - over[1]], 1), jnp.float32)
    product = _product(a, b, ones, over)
    kernel = (
        "a size is a symbol" if product.is_symbolic else choose(cpu.KERNELS, product)
    )
    if isinstance(kernel, str) or not kernel.rounds_to_int8(product):
        return _in_float32(a, b, *scales, **static)
    a, b = (
        x if axis == -1 else cpu.transposed(x)
        for x, axis in zip((a, b), over, strict=True)
    )
    # The kernel rounds again, which changes nothing: the largest code is 127.
    out = kernel.lower(product, a.astype(jnp.float32), b, ones)
    return _scaled(out, scales, static["has"], static["out_dtype"])


def _product(a, b, ones, over):
    """Return the product of rows of `a` with rows of `b`."""
    shape = lambda x, axis: (*x.shape[:-2], x.shape[-3 - axis], x.shape[axis])
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    of_a, of_b = map(shape, (a, b), over)
    return _matmul.of(of(of_a, jnp.float32), of(of_b, jnp.int8), ones)


def _on_tpu(a, b, *scales, over, has, out_dtype):
    from ..kernels import tpu

    left, right = _both(scales, has)
    # The kernel multiplies the scales of `b` only if these are not contracted.
    fits = right is None or over[1] == -1
    is_int8 = a.dtype == jnp.int8 == b.dtype
    if not (is_int8 and fits and tpu.multiplies_int8(a.shape, b.shape, over)):
        return _by_xla(a, b, *scales, over=over, has=has, out_dtype=out_dtype)
    # The kernel that rounds along rows writes them as columns, so nothing moves here.
    a = a if over[0] == -1 else jnp.swapaxes(a, -1, -2)
    one = jnp.ones((), jnp.float32)
    left = jnp.broadcast_to(one if left is None else left, (*a.shape[:-1], 1))
    right = jnp.broadcast_to(one if right is None else right, (*b.shape[:-1], 1))
    matmul = dataclasses.replace(
        _matmul, contract_rows=over[1] == -2, out_dtype=out_dtype
    )
    return tpu.INT8.lower(matmul.of(a, b, right), a, b, right, left)


@codes_dot_p.def_abstract_eval
def _abstract_eval(a, b, *_, over, has, out_dtype):
    del has
    m, n = (x.shape[-3 - axis] for x, axis in zip((a, b), over, strict=True))
    return a.update(shape=(*a.shape[:-2], m, n), dtype=out_dtype, weak_type=False)


define_impl(codes_dot_p, _by_xla)
_lower = lambda fn: mlir.lower_fun(fn, multiple_results=False)
_lower_by_xla, _lower_in_float32 = _lower(_by_xla), _lower(_in_float32)
_lower_on_cpu, _lower_on_tpu = _lower(_on_cpu), _lower(_on_tpu)


def _lower_for_cpu(ctx, *args, **static):
    # The compiler cannot partition a native kernel, and an exported program may run on
    # a machine without the native library.
    is_portable = is_automatically_partitioned(ctx) or is_exported(ctx)
    lower = _lower_in_float32 if is_portable else _lower_on_cpu
    return lower(ctx, *args, **static)


def _lower_for_tpu(ctx, *args, **static):
    lower = _lower_by_xla if is_automatically_partitioned(ctx) else _lower_on_tpu
    return lower(ctx, *args, **static)


mlir.register_lowering(codes_dot_p, _lower_by_xla)
mlir.register_lowering(codes_dot_p, _lower_for_cpu, platform="cpu")
mlir.register_lowering(codes_dot_p, _lower_for_tpu, platform="tpu")


def _batch(args, dims, **static):
    return codes_dot_p.bind(*map_all_first(args, dims), **static), 0


batching.primitive_batchers[codes_dot_p] = _batch
