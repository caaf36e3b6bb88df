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

from ._compat import is_automatically_partitioned, is_exported
from ._eager import define_impl


def rowwise(name: str, anywhere: Callable, native: Callable) -> Callable:
    """Make a primitive, and return its bind function.

    **Arguments:**

    - `name`: the name of the primitive.
    - `anywhere`: a function of an array and of static parameters, for every platform.
    - `native`: the same function by a native kernel, for CPUs.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def portable(array, *, static: tuple):
        return anywhere(array, *static)

    def with_kernel(array, *, static: tuple):
        return native(array, *static)

    define_impl(primitive, portable)

    @primitive.def_abstract_eval
    def _abstract_eval(array, *, static: tuple):
        like = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return [
            array.update(shape=out.shape, dtype=out.dtype, weak_type=False)
            for out in jax.eval_shape(ft.partial(with_kernel, static=static), like)
        ]

    lower_anywhere = mlir.lower_fun(portable, multiple_results=True)
    lower_native = mlir.lower_fun(with_kernel, multiple_results=True)

    def lower_for_cpu(ctx, array, *, static: tuple):
        # The compiler cannot partition a native kernel, and an exported program may run
        # on a machine without the native library.
        is_portable = is_automatically_partitioned(ctx) or is_exported(ctx)
        lower = lower_anywhere if is_portable else lower_native
        return lower(ctx, array, static=static)

    mlir.register_lowering(primitive, lower_anywhere)
    mlir.register_lowering(primitive, lower_for_cpu, platform="cpu")

    def batch(args, dims, *, static: tuple):
        (array,), (dim,) = args, dims
        out = primitive.bind(jnp.moveaxis(array, dim, 0), static=static)
        return out, [0] * len(out)

    batching.primitive_batchers[primitive] = batch
    return lambda array, *static: primitive.bind(array, static=static)
