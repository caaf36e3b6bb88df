"""Change how the products of a whole model are computed."""

import dataclasses
from typing import Any

from .._jax import typed
from ..arrays import quantized_arrays, QuantizedArray, replace_quantized
from ..kernels import Compute
from ._sites import Tree


@typed
def with_compute(tree: Tree, **fields: Any) -> Tree:
    """Change how products with the quantized arrays of a model are computed.

    Codes and scales do not change. JAX compiles the model again.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, "int8", precision="default")
        exact = eqquant.with_compute(model, precision="highest")
        assert exact.layers[0].weight.compute.precision == "highest"
        ```

    To change a part of a model, use `eqx.tree_at` with
    `replace_fn=lambda layer: eqquant.with_compute(layer, activations="int8")`.

    **Arguments:**

    - `tree`: any pytree with quantized arrays, whole or abstract. They may be inside of
        rotated arrays, adapters and arrays that are being trained.
    - `**fields`: fields of [`eqquant.kernels.Compute`][]: `precision`, `activations`,
        `tpu` and `gpu`. Other fields keep their values.

    **Returns:**

    A pytree of the same type.

    **Raises:**

    - `TypeError` if [`eqquant.kernels.Compute`][] has no such field.
    - `ValueError` if a value is not valid, or if `tree` contains no quantized array.
    """
    names = [field.name for field in dataclasses.fields(Compute)]
    if unknown := sorted(fields.keys() - set(names)):
        raise TypeError(
            f"with_compute: {', '.join(unknown)} must be fields of "
            f"eqquant.kernels.Compute, which are {', '.join(names)}."
        )
    Compute(**fields)  # Check the values, even if there is no quantized array.
    if not quantized_arrays(tree):
        raise ValueError(
            "with_compute: tree must contain quantized arrays, but has none. Quantize "
            "it first, for example with eqquant.quantize_tree."
        )

    def change(q: QuantizedArray) -> QuantizedArray:
        return q.with_static(compute=dataclasses.replace(q.compute, **fields))

    return replace_quantized(change, tree)
