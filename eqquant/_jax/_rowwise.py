"""Primitives for row-wise functions that have a native kernel on CPUs.

A row-wise function maps `(*lead, size)` to arrays whose first axes are `lead`. Its
batching rule adds rows.
"""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ._compat import config, is_automatically_partitioned, is_exported


def rowwise(name: str, anywhere: Callable, native: Callable) -> Callable:
    """Make a primitive, and return its bind function.

    **Arguments:**

    - `name`: the name of the primitive.
    - `anywhere`: a function of an array and of static parameters, for every platform.
    - `native`: the same function by a native kernel, for CPUs.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @ft.cache
    def compiled(**params):
        return jax.jit(ft.partial(primitive.bind, **params))

    @primitive.def_impl
    def _impl(array, **params):
        if config("jax_disable_jit"):  # `jit(bind)` would recurse.
            return anywhere(array, **params)
        return compiled(**params)(array)

    @primitive.def_abstract_eval
    def _abstract_eval(array, **params):
        like = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return [
            array.update(shape=out.shape, dtype=out.dtype, weak_type=False)
            for out in jax.eval_shape(ft.partial(native, **params), like)
        ]

    lower_anywhere = mlir.lower_fun(anywhere, multiple_results=True)
    lower_native = mlir.lower_fun(native, multiple_results=True)

    def lower_for_cpu(ctx, *args, **params):
        # The compiler cannot partition a native kernel, and an exported program may run
        # on a machine without the native library.
        portable = is_automatically_partitioned(ctx) or is_exported(ctx)
        return (lower_anywhere if portable else lower_native)(ctx, *args, **params)

    mlir.register_lowering(primitive, lower_anywhere)
    mlir.register_lowering(primitive, lower_for_cpu, platform="cpu")

    def batch(args, dims, **params):
        (array,), (dim,) = args, dims
        out = primitive.bind(jnp.moveaxis(array, dim, 0), **params)
        return out, [0] * len(out)

    batching.primitive_batchers[primitive] = batch
    return primitive.bind
