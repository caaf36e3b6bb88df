"""Stacks of linear layers that a file stores in several formats, such as `Q4_K_M`."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int


class Mixed(eqx.Module):
    """The linear layers at one place of all layers: a stack for each format."""

    stacks: tuple[eqx.nn.Linear, ...]
    kinds: tuple[int, ...] = eqx.field(static=True)  # The stack of each layer.

    @classmethod
    def split(cls, stack: eqx.nn.Linear, kinds: Sequence[int]) -> "Mixed":
        """Split one stack."""
        of_kind = lambda kind: np.flatnonzero(np.array(kinds) == kind)
        take = lambda x, kind: x[of_kind(kind)] if eqx.is_array(x) else x
        stacks = (
            jax.tree.map(ft.partial(take, kind=kind), stack)
            for kind in range(max(kinds) + 1)
        )
        return cls(tuple(stacks), tuple(kinds))

    def where(self, layer: int) -> tuple[int, int]:
        """Return the stack of a layer, and its index in the stack."""
        return self.kinds[layer], self.kinds[:layer].count(self.kinds[layer])

    def of_layer(self, layer: int) -> eqx.nn.Linear:
        kind, i = self.where(layer)
        return layer_at(self.stacks[kind], i)

    def scanned(self, layer: Int[Array, ""]) -> Callable:
        """Return the linear layer of a layer whose number is traced."""
        where = jnp.array([self.where(i) for i in range(len(self.kinds))])
        kind, i = where[layer]
        branches = [lambda x, s=s: layer_at(s, i)(x) for s in self.stacks]
        return lambda x: lax.switch(kind, branches, x)


def is_mixed(x: Any) -> bool:
    return isinstance(x, Mixed)


def layer_at(stack: Any, i: Int[Array, ""] | int) -> Any:
    """Return one layer of a stack."""
    return jax.tree.map(lambda x: x[i] if eqx.is_array(x) else x, stack)


Linear = eqx.nn.Linear | Mixed
