"""Rounding to int8 with one scale per row, as a primitive with kernels for CPUs and
TPUs."""

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Int8

from ..._jax import (
    define_impl,
    is_automatically_partitioned,
    is_exported,
    match_varying,
)
from ...kernels import cpu
from ...primitives import map_all_first
from ._codes import unit_of


round_int8_p = Primitive("round_int8")
round_int8_p.multiple_results = True


def round_int8(
    x: Float[Array, "*stack rows columns"],
    axis: int,
    factor: Float[Array, "*stack _ _"] | None = None,
) -> tuple[Int8[Array, "*stack rows columns"], Float[Array, "*stack _ _"]]:
    """Round `x * factor` along an axis, which is -1 or -2.

    Scales have one element along the axis, and factors one along the other.
    """
    factors = () if factor is None else (factor,)
    return tuple(round_int8_p.bind(*match_varying(x, *factors), axis=axis))


def _by_xla(x, *factors, axis):
    x = x.astype(jnp.float32)
    for factor in factors:
        x = x * factor
    scales = unit_of(x, axis, 127.0)
    codes = jnp.clip(jnp.round(x * (1 / scales)), -127, 127).astype(jnp.int8)
    return codes, scales


def _on_cpu(x, *factors, axis):
    is_native = axis == -1 and not factors and x.dtype == jnp.float32 and x.size
    if not is_native or isinstance(cpu.load(), str):
        return _by_xla(x, *factors, axis=axis)
    return cpu.round_rows(x)


def _on_tpu(x, *factors, axis):
    from ...kernels import tpu

    if not tpu.can_round_along(x.shape, axis):
        return _by_xla(x, *factors, axis=axis)
    return tpu.round_along(x, factors[0] if factors else None, axis)


@round_int8_p.def_abstract_eval
def _abstract_eval(x, *_, axis):
    place = x.ndim + axis
    shape = (*x.shape[:place], 1, *x.shape[place + 1 :])
    of = lambda shape, dtype: x.update(
        shape=shape, dtype=jnp.dtype(dtype), weak_type=False
    )
    return of(x.shape, jnp.int8), of(shape, jnp.float32)


define_impl(round_int8_p, _by_xla)
_lower = lambda fn: mlir.lower_fun(fn, multiple_results=True)
_lower_by_xla, _lower_on_cpu, _lower_on_tpu = map(_lower, (_by_xla, _on_cpu, _on_tpu))


def _lower_for_cpu(ctx, *args, axis):
    # As in `codes_dot`.
    is_portable = is_automatically_partitioned(ctx) or is_exported(ctx)
    lower = _lower_by_xla if is_portable else _lower_on_cpu
    return lower(ctx, *args, axis=axis)


def _lower_for_tpu(ctx, *args, axis):
    lower = _lower_by_xla if is_automatically_partitioned(ctx) else _lower_on_tpu
    return lower(ctx, *args, axis=axis)


mlir.register_lowering(round_int8_p, _lower_by_xla)
mlir.register_lowering(round_int8_p, _lower_for_cpu, platform="cpu")
mlir.register_lowering(round_int8_p, _lower_for_tpu, platform="tpu")


def _batch(args, dims, *, axis):
    return round_int8_p.bind(*map_all_first(args, dims), axis=axis), (0, 0)


batching.primitive_batchers[round_int8_p] = _batch
