"""The leaves that `load_quantized` would return, before their tensors are read."""

from typing import Any

import jax

from ..arrays import quantize
from ..kernels import Compute
from ._load import is_array
from ._plan import AnyContents, Plan


def abstract_leaf(contents: AnyContents, plan: Plan, compute: Compute) -> Any:
    """Return a leaf with a `jax.ShapeDtypeStruct` for each array."""
    leaf, layout, choice = plan.site.leaf, plan.layout, plan.choice
    if layout is None:
        return leaf
    if not is_array(leaf):
        return contents.read(layout.names[0])
    plain = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if contents.are_quantized(layout.names):
        kept = 0 if layout.rows is None else 1

        def whole(x):
            return jax.ShapeDtypeStruct((*layout.lead, *x.shape[kept:]), x.dtype)

        out = jax.tree.map(whole, contents.abstract(layout.names[0]))
    elif choice is not None:
        make = lambda x: quantize(x, choice.format, axis=choice.axis)
        out = jax.eval_shape(make, plain)
    else:
        return plain
    return out.with_dtype(leaf.dtype).with_static(compute=plan.compute or compute)
