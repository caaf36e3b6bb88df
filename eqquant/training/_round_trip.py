"""What an array is once quantized and dequantized, as a primitive: one that a CPU
computes in one pass, without any codes. Every other platform quantizes and dequantizes.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Bool, Float

from .._compat import (
    config,
    has_explicit_axes,
    is_automatically_partitioned,
    is_exported,
)
from .._quantize import encode
from ..formats import Format
from ..kernels import cpu


round_trip_p = Primitive("round_trip")
round_trip_p.multiple_results = True


def has_round_trip(array: Float[Array, "..."], format: Format, axis) -> bool:
    """Whether there is something to gain by [`round_trip`][]."""
    return (
        axis in (-1, array.ndim - 1)
        and array.ndim > 0
        and not has_explicit_axes()
        and cpu.rounds(array, format)
    )


def round_trip(
    array: Float[Array, "*lead size"], format: Format
) -> tuple[Float[Array, "*lead size"], Bool[Array, "*lead"]]:
    """What `array` is once quantized along its last axis, and dequantized; and whether
    a row holds something that cannot be."""
    value, problems = round_trip_p.bind(array, format=format)
    return value, problems


def _by_codes(array, *, format: Format):
    q, problem = encode(array, format, (-1,))
    return q.dequantize(), jnp.broadcast_to(problem, array.shape[:-1])


@ft.cache
def _compiled(format: Format):
    return jax.jit(ft.partial(round_trip_p.bind, format=format))


@round_trip_p.def_impl
def _impl(array, *, format):
    if config("jax_disable_jit"):  # Then `jit(bind)` would come back here.
        return _by_codes(array, format=format)
    return _compiled(format)(array)


@round_trip_p.def_abstract_eval
def _abstract_eval(array, **_):
    problems = array.update(shape=array.shape[:-1], dtype=jnp.bool_, weak_type=False)
    return array.update(weak_type=False), problems


_lower = mlir.lower_fun(_by_codes, multiple_results=True)
_lower_native = mlir.lower_fun(cpu.round_trip, multiple_results=True)


def _lower_for_cpu(ctx, *args, **params):
    # The compiler cannot split a native kernel over devices, and what is exported may
    # run where there is no library.
    portable = is_automatically_partitioned(ctx) or is_exported(ctx)
    return (_lower if portable else _lower_native)(ctx, *args, **params)


mlir.register_lowering(round_trip_p, _lower)
mlir.register_lowering(round_trip_p, _lower_for_cpu, platform="cpu")


def _batch(args, dims, *, format):
    (array,), (dim,) = args, dims
    return round_trip_p.bind(jnp.moveaxis(array, dim, 0), format=format), (0, 0)


batching.primitive_batchers[round_trip_p] = _batch
