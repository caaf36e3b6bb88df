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


class Joined(eqx.Module):
    """Linear layers whose weights are the rows of one weight."""

    weight: eqquant.QuantizedArray
    bias: Float[Array, "*lead out"] | None
    sizes: tuple[int, ...] = eqx.field(static=True)  # The rows of each layer.

    def __call__(self, x: Float[Array, " size"]) -> list[Float[Array, " out"]]:
        y = self.weight @ x
        y = y if self.bias is None else y + self.bias
        return jnp.split(y, [*itertools.accumulate(self.sizes)][:-1])


def project(linear: Any, x: Float[Array, "batch length size"]) -> Any:
    return jax.vmap(jax.vmap(linear))(x)


def project_all(
    linears: Sequence[Linear | Joined | None], x: Float[Array, "batch length size"]
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

    The weights are copied. An abstract model stays abstract.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        return eqx.filter_eval_shape(_join, model)
    return _join(model)


def _join(model):
    is_stack = not isinstance(model.layers, tuple)
    layers = [model.layers] if is_stack else model.layers
    layers = tuple(map(_join_layer, layers))
    new = layers[0] if is_stack else layers
    return eqx.tree_at(lambda model: model.layers, model, new)


def _join_layer(layer):
    attention = lambda x: (x.attention.query, x.attention.key, x.attention.value)
    mlp = lambda x: (x.mlp.gate, x.mlp.up)
    # A mixture of experts has other products.
    places = (attention, mlp) if hasattr(layer.mlp, "gate") else (attention,)
    for where in places:
        layer = eqx.tree_at(where, layer, _joined(where(layer)))
    return layer


@jax.jit
@ft.partial(eqquant.quaxify, on_materialise="error")
def _concatenate_rows(*weights):
    return jnp.concatenate(weights, -2)


def _joined(linears: Sequence[Linear]) -> tuple[Linear | Joined | None, ...]:
    """Join runs of layers with the same format."""
    out: list[Linear | Joined | None] = []
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


def _kind(linear: Linear) -> Any:
    """Return what neighbours need to have in common. Only quantized weights whose rows
    have their own scales can be joined."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, eqquant.QuantizedArray) or weight.axes != (-1,):
        return id(linear)
    columns = [(leaf.shape[-1], leaf.dtype) for leaf in jax.tree.leaves(weight)]
    return jax.tree.structure(weight), columns, linear.bias is None
