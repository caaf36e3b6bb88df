"""Eager calls of primitives."""

import functools as ft
from collections.abc import Callable

import jax
from jax.extend.core import Primitive

from ._compat import config


def define_impl(primitive: Primitive, uncompiled: Callable) -> None:
    """Compile a primitive when it is called eagerly.

    With `jax_disable_jit`, call `uncompiled` with the operands and static parameters
    instead, because `jit(bind)` would recurse.
    """

    @ft.cache
    def compiled(**static):
        return jax.jit(ft.partial(primitive.bind, **static))

    @primitive.def_impl
    def _impl(*args, **static):
        if config("jax_disable_jit"):
            return uncompiled(*args, **static)
        return compiled(**static)(*args)
