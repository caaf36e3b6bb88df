"""Arrays that wrap a weight and change only its products. A checkpoint stores the
weight: the computation is not part of a file."""

import operator
from typing import Any

import equinox as eqx
import jax

from ..arrays import is_implicit
from ..trees import errors_at, map_weights, sites


def without_wrappers(tree: Any) -> Any:
    """Replace each array that has a `stored_part` by this part, also in adapters."""

    def unwrap(weight):
        name = _stored_part(weight)
        return getattr(weight, name) if name else weight

    unwrap_leaf = lambda leaf: map_weights(unwrap, leaf)
    return jax.tree.map(unwrap_leaf, tree, is_leaf=is_implicit)


def with_wrappers(like: Any, tree: Any, caller: str) -> Any:
    """Put the parts in `tree` into the arrays of `like`: the inverse of
    [`without_wrappers`][]. Raise a `ValueError` with the path if a part does not fit.
    """
    wrappers, treedef = jax.tree.flatten(like, is_leaf=is_implicit)
    out = treedef.flatten_up_to(tree)
    for i, (site, wrapper) in enumerate(zip(sites(like), wrappers, strict=True)):
        with errors_at(f"{caller}: at {site.path}"):
            out[i] = map_weights(_wrapped, out[i], wrapper)
    return jax.tree.unflatten(treedef, out)


def _wrapped(part: Any, wrapper: Any) -> Any:
    if not (name := _stored_part(wrapper)):
        return part
    new = eqx.tree_at(operator.attrgetter(name), wrapper, part)
    for problem in new.problems():
        raise ValueError(str(problem))
    return new


def _stored_part(x: Any) -> str | None:
    return x.stored_part if is_implicit(x) else None
