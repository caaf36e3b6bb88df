"""Change the dtype of a whole model."""

from typing import Any

import jax
import jax.numpy as jnp

from .._jax import typed, wrong
from ..arrays import is_implicit
from ._sites import Tree


@typed
def cast_tree(model: Tree, dtype: Any) -> Tree:
    """Cast the floating-point arrays of a model, also of a quantized model.

    A quantized array keeps its codes and scales. Only the dtype of its dequantized
    values and of its products changes. Do not cast every array by `jax.tree.map`: that
    casts the scales, and float16 turns small scales into zeros.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.cast_tree(eqquant.quantize_tree(model, "nf4"), "bfloat16")
        assert model(jnp.ones(64, "bfloat16")).dtype == "bfloat16"
        assert model.layers[0].weight.scales.dtype == "float32"
        ```

    **Arguments:**

    - `model`: any pytree. Integers, complex numbers and other leaves do not change.
    - `dtype`: a floating-point dtype, or the name of one.

    **Returns:**

    A pytree of the same type.

    **Raises:**

    `TypeError` if `dtype` is not a floating-point dtype.
    """
    try:
        new = jnp.dtype(dtype)
    except TypeError:
        new = None
    if new is None or not jnp.issubdtype(new, jnp.floating):
        accepted = "a floating-point dtype, such as 'bfloat16'"
        raise TypeError(wrong("cast_tree", "dtype", dtype, accepted))

    def cast(leaf: Any) -> Any:
        old = getattr(leaf, "dtype", None)
        is_float = old is not None and jnp.issubdtype(old, jnp.floating)
        return leaf.astype(new) if is_float else leaf

    return jax.tree.map(cast, model, is_leaf=is_implicit)
