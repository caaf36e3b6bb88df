"""The leaves that `load_quantized` would return, before their tensors are read."""

from typing import Any

import jax

from ..arrays import quantize
from ..kernels import Compute
from ..trees import Choice, errors_at
from ._load import is_array
from ._plan import AnyContents, CALLER, Plan
from .files import cannot_concatenate


def abstract_quantized(leaf: Any, choice: Choice) -> Any:
    """Return what quantizing an array would return."""
    make = lambda x: quantize(x, choice.format, axis=choice.axis)
    return jax.eval_shape(make, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def abstract_leaf(contents: AnyContents, plan: Plan, compute: Compute) -> Any:
    """Return a leaf with a `jax.ShapeDtypeStruct` for each array."""
    leaf, layout, choice = plan.site.leaf, plan.layout, plan.choice
    if layout is None:
        return leaf
    if not is_array(leaf):
        return contents.read(layout.names[0])
    plain = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if contents.are_quantized(layout.names):
        first = layout.tensors[0]
        kept = 0 if first.rows is None else 1

        def whole(x):
            if first.rows is not None and x.shape[:1] != (first.rows.stop,):
                raise cannot_concatenate(first.name)
            return jax.ShapeDtypeStruct((*layout.lead, *x.shape[kept:]), x.dtype)

        with errors_at(f"{CALLER}: at {plan.site.path}"):
            out = jax.tree.map(whole, contents.abstract(first.name))
    elif choice is not None:
        out = abstract_quantized(leaf, choice)
    else:
        return plain
    return out.with_dtype(leaf.dtype).with_static(compute=plan.compute or compute)
