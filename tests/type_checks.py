"""Run-time type checks of every function of eqquant, internal ones included."""

import dataclasses
import functools as ft
import inspect

import jaxtyping
from beartype import beartype


_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check the functions of modules of eqquant that are imported later.

    jaxtyping's import hook decorates every function and class with
    `jaxtyping.jaxtyped`. That decorator compiles two functions on import, and checks
    the arguments of a call twice. `checked` takes a third of the time.
    """
    jaxtyping.jaxtyped = _replaced
    jaxtyping.install_import_hook("eqquant", f"{__name__}.checked")
    from eqquant._jax import _warn

    _warn._internal += (__name__,)  # Warnings skip the frames of `call`.


def _replaced(*args, **options):
    if options.get("typechecker", beartype) is beartype:  # Not from the import hook.
        return _jaxtyped(*args, **options)
    return checked


def checked(fn):
    """Check arguments and results. Equal names of axes must have equal sizes."""
    if inspect.isclass(fn):
        is_checked = getattr(fn.__init__, "__globals__", None) is globals()
        if dataclasses.is_dataclass(fn) and not is_checked:
            fn.__init__ = checked(fn.__init__)
        return fn
    if inspect.isgeneratorfunction(fn):  # `beartype` would check its first step.
        return _jaxtyped(fn, typechecker=beartype)

    @ft.cache  # On the first call, because it takes milliseconds.
    def by_type():
        return beartype(fn)

    @ft.wraps(fn)
    def call(*args, **kwargs):
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        with _jaxtyped("context"):
            return by_type()(*args, **kwargs)

    return call
