"""The product of two arrays of narrow numbers: int8, 8-bit floats or bfloat16.

XLA multiplies these natively on TPUs and GPUs, except for short sums of int8 on GPUs
(see `gpu_sums_int8`). On TPUs with an int8 matrix unit, a
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
from ..kernels import (
    choose,
    Compute,
    cpu,
    gpu_sums_int8,
    longest_int8_sum,
    Matmul,
)
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

    The products are exact. Sums are exact for int8, unless XLA:CPU computes them, or a
    GPU in bfloat16. They have float32 precision for floats. For int8, the largest
    magnitude of each row of `a` is 127, or all values are zero. There are no
    derivatives.
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
    size, longest = a.shape[over[0]], longest_int8_sum
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
    product, kernel = _choose_on_cpu(a, b, static["over"])
    if kernel is None:
        return _by_xla(a, b, *scales, **static)
    if isinstance(kernel, str):
        return _in_float32(a, b, *scales, **static)
    a, b = (
        x if axis == -1 else cpu.transposed(x)
        for x, axis in zip((a, b), static["over"], strict=True)
    )
    # The kernel rounds again, which changes nothing: the largest code is 127.
    ones = jnp.ones((*b.shape[:-1], 1), jnp.float32)
    out = kernel.lower(product, a.astype(jnp.float32), b, ones)
    return _scaled(out, scales, static["has"], static["out_dtype"])


def _choose_on_cpu(a, b, over) -> tuple[Any, Any]:
    """Return the product of rows of `a` with rows of `b`, and the native kernel that
    multiplies int8.

    Instead of the kernel, return None if XLA multiplies the operands as they are, or
    the reason why it multiplies in float32.
    """
    is_bfloat16 = a.dtype == jnp.bfloat16 == b.dtype
    if is_bfloat16 and getattr(cpu.load(), "bfloat16", False):
        return None, None
    if a.dtype != jnp.int8:
        return None, "CPUs multiply no such numbers"
    shape = lambda x, axis: (*x.shape[:-2], x.shape[-3 - axis], x.shape[axis])
    of = jax.ShapeDtypeStruct
    of_a, of_b = map(shape, (a, b), over)
    ones = of((*of_b[:-1], 1), jnp.float32)
    product = _matmul.of(of(of_a, jnp.float32), of(of_b, jnp.int8), ones)
    if product.is_symbolic:
        return product, "a size is a symbol"
    kernel = choose(cpu.KERNELS, product)
    if isinstance(kernel, cpu.NativeKernel) and kernel.arithmetic != "int8":
        kernel = "this CPU does not multiply int8"
    return product, kernel


def _on_gpu(a, b, *scales, over, has, out_dtype):
    if _in_bfloat16(a, over):
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return _by_xla(a, b, *scales, over=over, has=has, out_dtype=out_dtype)


def _in_bfloat16(a, over) -> bool:
    """Return whether GPUs multiply codes in bfloat16 instead of int8."""
    size = a.shape[over[0]]
    return a.dtype == jnp.int8 and isinstance(size, int) and not gpu_sums_int8(size)


def _has_tpu_kernel(a, b, over, has) -> bool:
    from ..kernels import tpu

    # The kernel multiplies the scales of `b` only if these are not contracted.
    fits = not has[1] or over[1] == -1
    is_int8 = a.dtype == jnp.int8 == b.dtype
    return is_int8 and fits and tpu.multiplies_int8(a.shape, b.shape, over)


def _on_tpu(a, b, *scales, over, has, out_dtype):
    from ..kernels import tpu

    left, right = _both(scales, has)
    if not _has_tpu_kernel(a, b, over, has):
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


def lowering_of_codes(a, b, *, over, has, platform: str, devices: int) -> str:
    """Describe how a platform multiplies two arrays of codes."""
    if platform == "cpu":
        if devices > 1:
            return "XLA, in float32, because the compiler partitions the product"
        _, kernel = _choose_on_cpu(a, b, over)
        if kernel is None:
            return "XLA, in bfloat16"
        if isinstance(kernel, str):
            return f"XLA, in float32, because {kernel}"
        return f"native kernel {kernel.name!r}"
    units = ()
    if platform == "tpu":
        from ..kernels import tpu

        if devices == 1 and _has_tpu_kernel(a, b, over, has):
            return "Pallas kernel, in int8"
        units = tpu.matrix_units()
    elif platform == "gpu":
        from ..kernels import gpu

        if _in_bfloat16(a, over):
            return "XLA, in bfloat16, because its sums of int8 may be wrong"
        units = gpu.matrix_units()
    kind = "float8" if a.dtype.itemsize == 1 else "bfloat16"
    kind = "int8" if a.dtype == jnp.int8 else kind
    if kind == "bfloat16" or kind in units:
        return f"XLA, in {kind}"
    return f"XLA, in bfloat16, because the chip does not multiply {kind}"


@codes_dot_p.def_abstract_eval
def _abstract_eval(a, b, *_, over, has, out_dtype):
    del has
    m, n = (x.shape[-3 - axis] for x, axis in zip((a, b), over, strict=True))
    return a.update(shape=(*a.shape[:-2], m, n), dtype=out_dtype, weak_type=False)


define_impl(codes_dot_p, _by_xla)
_lower = lambda fn: mlir.lower_fun(fn, multiple_results=False)
_lower_by_xla, _lower_in_float32 = _lower(_by_xla), _lower(_in_float32)
_lower_on_cpu, _lower_on_tpu = _lower(_on_cpu), _lower(_on_tpu)
_lower_on_gpu = _lower(_on_gpu)


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
mlir.register_lowering(codes_dot_p, _lower_on_gpu, platform="gpu")


def _batch(args, dims, **static):
    return codes_dot_p.bind(*map_all_first(args, dims), **static), 0


batching.primitive_batchers[codes_dot_p] = _batch
