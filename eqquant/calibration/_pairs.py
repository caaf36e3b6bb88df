"""The float model and the quantized model of a calibration, mapped as one model."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..arrays import dequantize, is_quantized
from ..trees import dequantize_tree
from .observed import MODELS


def changes(model: Any, quantized: Any, caller: str) -> list:
    """Return the arrays of `quantized` in the order of the leaves of `model`, and None
    for leaves that both models share.

    Raises a `ValueError` unless the models only differ in the values of arrays.
    """
    dense = eqx.filter_eval_shape(dequantize_tree, quantized)
    leaves, treedef = jax.tree.flatten(model)
    shapes = lambda tree: [getattr(x, "shape", None) for x in jax.tree.leaves(tree)]
    if jax.tree.structure(dense) != treedef or shapes(dense) != shapes(leaves):
        raise ValueError(
            f"{caller}: quantized must be the model after `quantize_tree`, with the "
            "same layers and shapes, got another structure. Quantize this model, or "
            "pass None."
        )
    others = jax.tree.leaves(quantized, is_leaf=is_quantized)
    pairs = zip(leaves, others, strict=True)
    return [None if b is a or not _has_values(b) else b for a, b in pairs]


def _has_values(leaf: Any) -> bool:
    return is_quantized(leaf) or eqx.is_array(leaf)


def sum_of_both(run: Callable[[Any], Array], model: Any, changed: list | None) -> Array:
    """Return the sum of `run` of the float model and of the quantized model.

    `changed` is the result of [`changes`][]. The two models are index 0 and index 1 of
    a mapped axis with the name `MODELS`. With None, return `run(model)`.
    """
    if changed is None:
        return run(model)
    leaves, treedef = jax.tree.flatten(model)
    both = list(zip(leaves, changed, strict=True))
    pairs = [None if b is None else jnp.stack([a, dequantize(b)]) for a, b in both]
    shared = treedef.unflatten([a if b is None else None for a, b in both])
    of_one = lambda own: run(eqx.combine(treedef.unflatten(own), shared))
    return jnp.sum(jax.vmap(of_one, axis_name=MODELS, axis_size=2)(pairs))
