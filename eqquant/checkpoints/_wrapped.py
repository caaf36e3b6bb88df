"""Arrays that wrap a weight and change only its products. A checkpoint stores the
weight: the computation is not part of a file."""

import operator
from typing import Any

import equinox as eqx
import jax

from ..arrays import is_implicit
from ..trees import base_of, errors_at, sites


def without_wrappers(tree: Any) -> Any:
    """Replace each array that has a `stored_part` by this part, also below adapters."""

    def unwrap(leaf):
        base = base_of(leaf)
        if name := _stored_part(base):
            return _with_base(leaf, getattr(base, name))
        return leaf

    return jax.tree.map(unwrap, tree, is_leaf=is_implicit)


def with_wrappers(like: Any, tree: Any, caller: str) -> Any:
    """Put the parts in `tree` into the arrays of `like`: the inverse of
    [`without_wrappers`][]. Raise a `ValueError` with the path if a part does not fit.
    """
    wrappers, treedef = jax.tree.flatten(like, is_leaf=is_implicit)
    out = treedef.flatten_up_to(tree)
    for i, (site, wrapper) in enumerate(zip(sites(like), wrappers, strict=True)):
        base = base_of(wrapper)
        if name := _stored_part(base):
            part = base_of(out[i])
            new = eqx.tree_at(operator.attrgetter(name), base, part)
            with errors_at(f"{caller}: at {site.path}"):
                for problem in new.problems():
                    raise ValueError(str(problem))
            out[i] = _with_base(out[i], new)
    return jax.tree.unflatten(treedef, out)


def _stored_part(x: Any) -> str | None:
    return x.stored_part if is_implicit(x) else None


def _with_base(leaf: Any, new: Any) -> Any:
    """Replace the weight below an adapter, or the leaf. Arrays may be abstract."""
    return new if base_of(leaf) is leaf else eqx.tree_at(base_of, leaf, new)
