"""The product of two arrays of narrow numbers: int8, 8-bit floats or bfloat16.

XLA multiplies these natively on TPUs and GPUs. On CPUs the native kernels multiply
int8. XLA:CPU converts both operands element by element, or does not vectorise the
product, which takes up to seven times as long as float32.
"""

import math
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
    a: Shaped[Array, "*stack _ _"], b: Shaped[Array, "*stack _ _"], over: tuple
) -> Float[Array, "*stack m n"]:
    """Contract axis `over[0]` of `a` with axis `over[1]` of `b`: each is -1 or -2.

    The products are exact. Sums are exact for int8, unless XLA:CPU computes them, and
    have float32 precision for floats. For int8, the largest magnitude of each row of
    `a` is 127, or all values are zero. There are no derivatives.
    """
    return codes_dot_p.bind(*match_varying(a, b), over=over)


def _by_xla(a, b, *, over):
    is_int8 = a.dtype == jnp.int8
    size, longest = a.shape[over[0]], xla.longest_int8_sum
    if is_int8 and isinstance(size, int) and size > longest:
        starts = range(0, size, longest)
        part = lambda x, axis, i: lax.slice_in_dim(
            x, i, min(i + longest, size), axis=axis
        )
        parts = (_by_xla(*map(part, (a, b), over, (i, i)), over=over) for i in starts)
        return sum(parts)
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


def _in_float32(a, b, *, over):
    return _dot(a.astype(jnp.float32), b.astype(jnp.float32), over, jnp.float32)


def _on_cpu(a, b, *, over):
    library = cpu.load()
    if a.dtype == jnp.bfloat16 == b.dtype and getattr(library, "bfloat16", False):
        return _by_xla(a, b, over=over)
    if a.dtype != jnp.int8:
        return _in_float32(a, b, over=over)
    shape = lambda x, axis: (*x.shape[:-2], x.shape[-3 - axis], x.shape[axis])
    of_a, of_b = map(shape, (a, b), over)
    ones = jnp.ones((*of_b[:-1], 1), jnp.float32)
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    product = _matmul.of(of(of_a, jnp.float32), of(of_b, jnp.int8), ones)
    kernel = (
        "a size is a symbol" if product.is_symbolic else choose(cpu.KERNELS, product)
    )
    if isinstance(kernel, str) or not kernel.rounds_to_int8(product):
        return _in_float32(a, b, over=over)
    a, b = (
        x if axis == -1 else cpu.transposed(x)
        for x, axis in zip((a, b), over, strict=True)
    )
    # The kernel rounds again, which changes nothing: the largest code is 127.
    return kernel.lower(product, a.astype(jnp.float32), b, ones)


@codes_dot_p.def_abstract_eval
def _abstract_eval(a, b, *, over):
    m, n = (x.shape[-3 - axis] for x, axis in zip((a, b), over, strict=True))
    shape = *a.shape[:-2], m, n
    return a.update(shape=shape, dtype=jnp.dtype("float32"), weak_type=False)


define_impl(codes_dot_p, _by_xla)
_lower = lambda fn: mlir.lower_fun(fn, multiple_results=False)
_lower_by_xla, _lower_in_float32 = _lower(_by_xla), _lower(_in_float32)
_lower_on_cpu = _lower(_on_cpu)


def _lower_for_cpu(ctx, a, b, *, over):
    # The compiler cannot partition a native kernel, and an exported program may run on
    # a machine without the native library.
    is_portable = is_automatically_partitioned(ctx) or is_exported(ctx)
    lower = _lower_in_float32 if is_portable else _lower_on_cpu
    return lower(ctx, a, b, over=over)


mlir.register_lowering(codes_dot_p, _lower_by_xla)
mlir.register_lowering(codes_dot_p, _lower_for_cpu, platform="cpu")


def _batch(args, dims, *, over):
    (a, b), (a_dim, b_dim) = args, dims
    if b_dim is None and over[0] == -1:
        # Rows of the left operand.
        a = jnp.moveaxis(a, a_dim, -3)
        rows = a.reshape(*a.shape[:-3], math.prod(a.shape[-3:-1]), a.shape[-1])
        out = codes_dot(rows, b, over)
        return out.reshape(*a.shape[:-1], out.shape[-1]), out.ndim - 2
    a, b = map_all_first(args, dims)
    return codes_dot(a, b, over), 0


batching.primitive_batchers[codes_dot_p] = _batch
