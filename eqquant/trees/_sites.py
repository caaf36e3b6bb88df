"""The leaves of a pytree, with their paths and owners."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu

from ..arrays import is_implicit


Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Site:
    """A leaf of a pytree, and what is known of the node that holds it."""

    path: str
    leaf: Any
    owner: Any
    field: str
    # Inside of a layer that computes its weight anew at each call.
    reparameterised: bool


def sites(tree: Any) -> Iterator[Site]:
    """Every leaf, in the order of `jax.tree.leaves`; implicit arrays are leaves."""
    return _sites(tree, "", None, "", False)


def _sites(node, path, owner, field, reparameterised) -> Iterator[Site]:
    children = [] if is_implicit(node) else _children(node)
    if children is None or is_implicit(node):
        yield Site(path, node, owner, field, reparameterised)
        return
    inside = reparameterised or isinstance(
        node, eqx.nn.SpectralNorm | eqx.nn.WeightNorm
    )
    # A container inside of a layer is part of it: the weights of a list, say.
    for key, child in children:
        name = _key_name(key)
        below = f"{path}.{name}" if path else name
        yield from _sites(child, below, node, name, inside)


def _children(node) -> list[tuple[Any, Any]] | None:
    """The children of a node, or None for a leaf."""
    children, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    if jtu.treedef_is_leaf(treedef) and children and children[0][1] is node:
        return None
    return [(keys[0], child) for keys, child in children]


def _key_name(key) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
