"""Linear layers with the same input as one product, for programs that generate text.

With few rows, a product waits for memory and for other threads. One product for query,
key and value waits once.
"""

import functools as ft
import itertools
from collections.abc import Sequence
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from mixed import Linear
from names import Names, path_of


# Linear layers with the same input.
_together = {"attention": ("query", "key", "value"), "mlp": ("gate", "up")}


class Joined(eqx.Module):
    """Linear layers whose weights are the rows of one weight."""

    weight: eqquant.QuantizedArray | eqquant.arrays.RotatedArray
    bias: Float[Array, "*lead out"] | None
    sizes: tuple[int, ...] = eqx.field(static=True)  # The rows of each layer.

    def __call__(self, x: Float[Array, " size"]) -> list[Float[Array, " out"]]:
        y = self.weight @ x
        y = y if self.bias is None else y + self.bias
        return jnp.split(y, [*itertools.accumulate(self.sizes)][:-1])


@eqquant.trees.register_weights(Joined)
def _(layer: Joined, name: str, array: Any) -> eqquant.trees.WeightAxes | None:
    return eqquant.trees.WeightAxes(axis=-1, out=-2) if name == "weight" else None


AnyLinear = Linear | Joined | None


def project(linear: Any, x: Float[Array, "batch length size"]) -> Any:
    return jax.vmap(jax.vmap(linear))(x)


def project_all(
    linears: Sequence[AnyLinear], x: Float[Array, "batch length size"]
) -> list[Float[Array, "batch length out"]]:
    """Return the output of each linear layer. `None` is a layer that an earlier
    [`Joined`][] contains."""
    outputs = []
    for linear in linears:
        if linear is not None:
            y = project(linear, x)
            outputs += y if isinstance(linear, Joined) else [y]
    return outputs


def join(model: Any) -> Any:
    """Join the quantized weights of query, key and value, and of gate and up, where
    neighbours have the same format.

    The weights are copied. An abstract model stays abstract, and a joined model is
    unchanged.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        return eqx.filter_eval_shape(_join, model)
    return _join(model)


def to_floats(model: Any) -> Any:
    """Replace quantized arrays of an abstract model by the floats that they stand
    for."""
    is_quantized = eqquant.is_quantized
    float_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.tree.map(
        lambda x: float_of(x) if is_quantized(x) else x, model, is_leaf=is_quantized
    )


def names_of_joined(names: Names, model: Any) -> Names:
    """Extend the names of tensors to the rows of each [`Joined`][] of a model."""
    is_joined = lambda x: isinstance(x, Joined)
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_joined)
    sizes = {path_of(path): x.sizes for path, x in leaves if is_joined(x)}

    def call(path: str) -> str | list:
        owner, field = path.rsplit(".", 1)
        if owner not in sizes:
            return names(path)
        block, first = owner.rsplit(".", 1)
        together = _together[block.rsplit(".", 1)[-1]]
        some = together[together.index(first) :][: len(sizes[owner])]
        rows = [names(f"{block}.{place}.{field}") for place in some]
        join = eqquant.checkpoints.Concatenated
        return join(*rows) if isinstance(rows[0], str) else list(map(join, *rows))

    return call


def _join(model):
    is_stack = not isinstance(model.layers, tuple)
    layers = [model.layers] if is_stack else model.layers
    layers = tuple(map(_join_layer, layers))
    new = layers[0] if is_stack else layers
    return eqx.tree_at(lambda model: model.layers, model, new)


def _join_layer(layer):
    for block, names in _together.items():
        if not hasattr(getattr(layer, block), names[0]):
            continue  # A mixture of experts.

        def where(layer, block=block, names=names):
            return [getattr(getattr(layer, block), name) for name in names]

        new = _joined(where(layer))
        layer = eqx.tree_at(where, layer, new, is_leaf=lambda x: x is None)
    return layer


@jax.jit
@ft.partial(eqquant.quaxify, on_materialise="error")
def _concatenate_rows(*weights):
    return jnp.concatenate(weights, -2)


def _joined(linears: Sequence[AnyLinear]) -> tuple[AnyLinear, ...]:
    """Join runs of layers with the same format."""
    out: list[AnyLinear] = []
    for _, run in itertools.groupby(linears, _kind):
        linears = list(run)
        if len(linears) == 1:
            out += linears
            continue
        weights = [linear.weight for linear in linears]
        weight = _concatenate_rows(*weights)
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else jnp.concatenate(biases, -1)
        sizes = tuple(weight.shape[-2] for weight in weights)
        out += [Joined(weight, bias, sizes), *[None] * (len(linears) - 1)]
    return tuple(out)


def _kind(linear: AnyLinear) -> Any:
    """Return what neighbours need to have in common. Only quantized weights whose rows
    have their own scales can be joined."""
    weight = getattr(linear, "weight", None)
    has_own_scales = eqquant.is_quantized(weight) and weight.axes == (-1,)
    if isinstance(linear, Joined) or not has_own_scales:
        return object()  # Unlike every other.
    columns = [(leaf.shape[-1], leaf.dtype) for leaf in jax.tree.leaves(weight)]
    return jax.tree.structure(weight), columns, linear.bias is None
