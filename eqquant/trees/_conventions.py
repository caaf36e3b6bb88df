"""The weights of known layers, with one entry for each kind of layer.

Classes of other libraries are found by name, so that no library is imported.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx

from .._jax import typed


Axis = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WeightAxes:
    """The role of an array in its layer, for [`eqquant.trees.register_weights`][].

    !!! Example

        ```python
        import eqquant
        import jax.numpy as jnp

        class Kernel:  # Computes `x @ kernel`.
            kernel = jnp.ones((64, 32))

        @eqquant.trees.register_weights(Kernel)
        def _(layer, name, array):
            return eqquant.trees.WeightAxes(-2, out=-1) if name == "kernel" else None
        ```

    **Arguments:**

    - `axis`: the axis (or axes) that the layer contracts.
    - `out`: the axis of its outputs; `None` for all other axes.
    - `is_table`: whether the layer looks up rows instead of multiplying, as an
        embedding does.
    """

    axis: Axis
    out: int | None = None
    is_table: bool = False


_conventions: list[tuple[type | str, Callable]] = []


@typed
def register_weights(*layers: type | str) -> Callable[[Callable], Callable]:
    """Declare the weights of a layer class.

    [`eqquant.quantize_tree`][] and [`eqquant.lora_tree`][] choose them by default.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        from jaxtyping import Array


        class Dense(eqx.Module):
            kernel: Array
            bias: Array

            def __call__(self, x):
                return x @ self.kernel + self.bias


        @eqquant.trees.register_weights(Dense)
        def _(layer, name, array):
            if name == "kernel":
                return eqquant.trees.WeightAxes(axis=-2, out=-1)
            return None


        kernel = jax.random.normal(jax.random.key(0), (64, 32))
        model = eqquant.quantize_tree(Dense(kernel, kernel[0]), "nf4")
        assert eqquant.is_quantized(model.kernel)
        ```

    **Arguments:**

    - `*layers`: classes; or their names with their modules, such as
        `"haliax.nn.linear.Linear"`, for classes that may not be installed.

    **Returns:**

    A decorator of a function `(layer, name, array)`. It is called with an instance of
    the class or of a subclass, the name of one of its arrays, and that array. It
    returns an [`eqquant.trees.WeightAxes`][], or `None` if the array is not a weight,
    or a string with the reason why the array cannot be chosen. The function that was
    registered last is tried first.

    **Raises:**

    `TypeError` if an argument is neither a class nor a string.
    """
    for layer in layers:
        if not isinstance(layer, type | str):
            raise TypeError(
                f"register_weights: expected classes, or their names, got {layer!r}."
            )

    def decorator(convention: Callable) -> Callable:
        _conventions.extend((layer, convention) for layer in layers)
        return convention

    return decorator


def convention_of(owner: Any) -> Callable | None:
    for layer, convention in reversed(_conventions):
        if _is_a(owner, layer):
            return convention
    return None


def _is_a(x: Any, cls: type | str) -> bool:
    if isinstance(cls, type):
        return isinstance(x, cls)
    return any(f"{c.__module__}.{c.__qualname__}" == cls for c in type(x).__mro__)


# Wrapper classes of one array, with the name of the array.
_holders = {
    "haliax.core.NamedArray": "array",
    "flax.nnx.variablelib.Variable": "value",
    "paramax.wrappers.NonTrainable": "tree",
}
# Wrappers that compute their array in each call.
_reparameterised = (
    eqx.nn.SpectralNorm,
    eqx.nn.WeightNorm,
    "paramax.wrappers.AbstractUnwrappable",
)


def is_holder(node: Any, name: str) -> bool:
    return any(_is_a(node, cls) and name == held for cls, held in _holders.items())


def is_reparameterised(node: Any) -> bool:
    return not any(_is_a(node, cls) for cls in _holders) and any(
        _is_a(node, cls) for cls in _reparameterised
    )


#
# Equinox
#


@register_weights(eqx.nn.Linear, eqx.nn.Embedding)
def _linear(layer, name, array):
    if name != "weight":
        return None
    is_table = isinstance(layer, eqx.nn.Embedding)
    return WeightAxes(-1, -2, is_table) if array.ndim > 1 else "of one axis"


@register_weights(eqx.nn.Conv, eqx.nn.ConvTranspose)
def _convolution(layer, name, array):
    window = layer.num_spatial_dims
    return (
        WeightAxes(tuple(range(-window - 1, 0)), -window - 2)
        if name == "weight"
        else None
    )


def axes_by_fields(layer: Any, name: str, array: Any) -> WeightAxes | None:
    """Return the axes of a weight if its layer has the fields of a linear layer or a
    convolution of `eqx.nn`, like copies of these classes."""
    fields, ndim = getattr(layer, "__dict__", {}), getattr(array, "ndim", 0)
    if name != "weight" or not callable(layer) or ndim < 2:
        return None
    if {"num_spatial_dims", "kernel_size"} <= fields.keys():
        window = layer.num_spatial_dims
        return WeightAxes(tuple(range(-window - 1, 0)), -window - 2)
    if {"in_features", "out_features"} <= fields.keys():
        matrix, sizes = array.shape[-2:], (layer.in_features, layer.out_features)
        known = {sizes[::-1]: WeightAxes(-1, -2), sizes: WeightAxes(-2, -1)}
        return known.get(matrix)
    if 3 <= ndim <= 5 and not fields.keys().isdisjoint(("stride", "padding")):
        return WeightAxes(tuple(range(1 - ndim, 0)), -ndim)
    return None


@register_weights(eqx.nn.GRUCell, eqx.nn.LSTMCell)
def _recurrent(layer, name, array):
    return WeightAxes(-1, -2) if name in ("weight_ih", "weight_hh") else None


#
# Flax and Haiku: dictionaries, and the modules of NNX
#

_kernels, _tables = ("kernel", "w"), ("embedding", "embeddings")
_biases = ("bias", "b")


@register_weights(Mapping, "flax.nnx.module.Module")
def _dictionary(layer, name, array):
    if name in _tables and array.ndim == 2:
        return WeightAxes(-1, is_table=True)
    if name in _kernels and array.ndim >= 2:
        get = layer.get if isinstance(layer, Mapping) else vars(layer).get
        found = (get(bias) for bias in _biases)
        return _kernel(array, next((b for b in found if b is not None), None))
    return None


@register_weights(tuple)
def _stax(layer, name, array):
    """Return the role of an array in a pair of a kernel and its bias."""
    if name == "0" and len(layer) == 2 and _put_out(array, layer[1]) == 1:
        return _kernel(array, layer[1])
    return None


def _put_out(array, bias) -> int:
    """Return the number of output axes of a kernel, which are last, like in its bias.

    Return 0 if the bias does not determine it.
    """
    out = tuple(getattr(bias, "shape", ()))
    while len(out) > 1 and out[0] == 1:
        out = out[1:]
    return len(out) if out == tuple(array.shape[1:])[-len(out) :] else 0


def _kernel(array, bias) -> WeightAxes | str:
    """Return the role of a kernel. The bias determines the output axes."""
    shape, ndim = tuple(array.shape), array.ndim
    if out := _put_out(array, bias):
        return WeightAxes(tuple(range(ndim - out)))
    # Stacked layers.
    if ndim == 3 and getattr(bias, "shape", ()) == (shape[0], shape[2]):
        return WeightAxes(-2)
    if ndim == 2:
        return WeightAxes(0)
    if ndim > 3:
        return WeightAxes(tuple(range(ndim - 1)))
    return "a kernel without a bias, whose contracted axes only a rule can tell"


#
# Haliax
#


@register_weights("haliax.nn.linear.Linear")
def _haliax_linear(layer, name, array):
    if name != "weight":
        return None
    contracted = layer.In if isinstance(layer.In, tuple) else (layer.In,)
    names = [axis.name for axis in layer.weight.axes]
    axes = [names.index(axis.name) - len(names) for axis in contracted]
    return WeightAxes(tuple(axes))


@register_weights("haliax.nn.embedding.Embedding")
def _haliax_embedding(layer, name, array):
    if name != "weight":
        return None
    names = [axis.name for axis in layer.weight.axes]
    row = [n for n in names if n != layer.Vocab.name]
    return WeightAxes(tuple(names.index(n) - len(names) for n in row), is_table=True)
