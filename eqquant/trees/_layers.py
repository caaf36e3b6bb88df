"""Layers that pass their weight to a function of JAX.

`eqx.nn.Linear` multiplies with `@`, which quantized arrays support. A convolution calls
`lax.conv_general_dilated`, which accepts JAX arrays only. With a quantized weight, its
class becomes a subclass that runs inside of `quaxify`. So model code does not change,
and `isinstance(layer, eqx.nn.Conv2d)` stays true. The same applies to layers that are
recognised by their fields.
"""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax

from ..arrays import is_implicit
from ..dispatch import quaxify
from ._conventions import axes_by_fields, convention_of


def _needs_dispatcher(x: Any) -> bool:
    if isinstance(x, eqx.nn.Conv | eqx.nn.ConvTranspose):
        return True
    if not isinstance(x, eqx.Module) or convention_of(x) is not None:
        return False
    return axes_by_fields(x, "weight", getattr(x, "weight", None)) is not None


def match_layers(model: Any) -> Any:
    """Return the model with the right class for each layer that calls JAX.

    With a quantized weight these layers run in the dispatcher. All others are plain.
    """
    return jax.tree.map(
        lambda x: _match(x) if _needs_dispatcher(x) else x,
        model,
        is_leaf=_needs_dispatcher,
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
    """Return a subclass of a layer class that runs inside of `quaxify`."""

    class Layer(written):
        _written = written
        __doc__ = written.__doc__

        def __call__(self, *args, **kwargs):
            return quaxify(super().__call__)(*args, **kwargs)

        def __reduce__(self):
            # Pickle finds a class by its name, but this class is not in a module.
            return _restore, (
                written,
                {f.name: getattr(self, f.name) for f in _fields(self)},
            )

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Layer, name, getattr(written, name))
    return Layer
