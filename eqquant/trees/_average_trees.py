"""The average of several models."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._jax import typed, wrong
from ..arrays import is_implicit, quantize, QuantizedArray
from ._sites import Tree


@typed
def average_trees(
    models: Sequence[Tree], weights: Sequence[float | int] | None = None
) -> Tree:
    """Average models of the same structure, also quantized models: a model soup, or one
    step of a moving average.

    Quantized arrays are dequantized, averaged in at least float32, and quantized again.
    Do not average or add quantized models by `jax.tree.map`: codes are not numbers. It
    raises an error outside of `jit`, but inside of `jit` a sum of integer codes
    overflows without an error.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        keys = jax.random.split(jax.random.key(0), 2)
        models = [eqx.nn.MLP(64, 10, 256, 2, key=key) for key in keys]
        models = [eqquant.quantize_tree(model, "int8") for model in models]
        soup = eqquant.trees.average_trees(models)
        moving = eqquant.trees.average_trees(models, [0.99, 0.01])
        assert soup.layers[0].weight.format == eqquant.Int8()
        ```

    **Arguments:**

    - `models`: one pytree or more, of the same structure and formats.
    - `weights`: a factor for each model. By default, all are equal and sum to 1.

    **Returns:**

    A pytree of the same type. Floating-point arrays are averages, and keep their dtype.
    Integers and other leaves are those of the first model.

    **Raises:**

    - `ValueError` if there are no models, if their structures differ, or if the number
        of weights is not the number of models.
    - `TypeError` for adapters and rotated arrays: merge or dequantize them first.
    """
    name = "average_trees"
    if not models:
        raise ValueError(wrong(name, "models", models, "one model or more"))
    if len({jax.tree.structure(model) for model in models}) > 1:
        raise ValueError(
            f"{name}: models must have the same structure and formats. Dequantize "
            "models of different formats first, with `eqquant.dequantize_tree`."
        )
    if weights is None:
        weights = [1 / len(models)] * len(models)
    if len(weights) != len(models):
        accepted = f"{len(models)} numbers, one for each model"
        raise ValueError(wrong(name, "weights", weights, accepted))

    def average(*leaves: Any) -> Any:
        first = leaves[0]
        if is_implicit(first):
            if not isinstance(first, QuantizedArray):
                raise TypeError(
                    f"{name}: cannot average {first!r}. Merge adapters with "
                    "`eqquant.merge_lora`, or use `eqquant.dequantize_tree`."
                )
            mean = average(*(q.dequantize() for q in leaves))
            options = {"axis": first.axes, "compute": first.compute}
            return quantize(mean, first.format, **options)
        if not eqx.is_inexact_array(first):
            return first
        dtype = jnp.promote_types(first.dtype, jnp.float32)
        terms = zip(leaves, weights, strict=True)
        total: Any = sum(w * x.astype(dtype) for x, w in terms)
        return total.astype(first.dtype)

    return jax.tree.map(average, *models, is_leaf=is_implicit)
