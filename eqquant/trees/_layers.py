"""Layers that hand their weight to a function of JAX, which takes no quantized array.

`eqx.nn.Linear` multiplies with `@`, which a quantized array has. A convolution calls
`lax.conv_general_dilated`. With a quantized weight its class becomes a subclass, which
does the same inside of `quaxify`; so model code, and code that asks `isinstance(layer,
eqx.nn.Conv2d)`, need not change.
"""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax

from ..arrays import is_implicit
from ..dispatch import quaxify


def _is_convolution(x: Any) -> bool:
    return isinstance(x, eqx.nn.Conv | eqx.nn.ConvTranspose)


def match_layers(model: Any) -> Any:
    """The model, in which convolutions with a quantized weight call themselves in the
    dispatcher, and all others are plain."""
    return jax.tree.map(
        lambda x: _match(x) if _is_convolution(x) else x, model, is_leaf=_is_convolution
    )


def _match(layer: Any) -> Any:
    written = getattr(type(layer), "_written", type(layer))
    cls = _in_dispatcher(written) if is_implicit(layer.weight) else written
    if type(layer) is cls:
        return layer
    return _make(cls, {f.name: getattr(layer, f.name) for f in _fields(layer)})


def _fields(layer: Any) -> list:
    return [f for f in dataclasses.fields(layer) if hasattr(layer, f.name)]


def _make(cls: type, fields: dict[str, Any]) -> Any:
    layer = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(layer, name, value)
    return layer


def _restore(written: type, fields: dict[str, Any]) -> Any:
    return _make(_in_dispatcher(written), fields)


@ft.cache
def _in_dispatcher(written: type) -> type:
    """A subclass of a class of layers, whose call is inside of `quaxify`."""

    class Layer(written):
        _written = written
        __doc__ = written.__doc__

        def __call__(self, *args, **kwargs):
            return quaxify(super().__call__)(*args, **kwargs)

        def __reduce__(self):
            # Pickle finds a class by its name, and this has none.
            return _restore, (
                written,
                {f.name: getattr(self, f.name) for f in _fields(self)},
            )

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Layer, name, getattr(written, name))
    return Layer
