"""The trainable leaves of a model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._jax import typed
from ..arrays import is_implicit, is_quantized, LoraArray


@typed
def trainable_mask(model: Any) -> Any:
    """Return which leaves to train: floating-point arrays outside of quantized arrays.

    In a model with adapters, only the adapters are trainable. The filter
    `eqx.is_inexact_array` is not suitable, because it is true for the scales of a
    quantized array.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, "nf4")
        trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
        assert trainable.layers[0].weight.scales is None
        assert trainable.layers[0].bias is not None
        ```

    **Arguments:**

    - `model`: any pytree.

    **Returns:**

    A pytree prefix of `model` with bools, for `eqx.partition`, `eqx.filter` and
    `optax.masked`.
    """
    adapters = any(map(_is_lora, jax.tree.leaves(model, is_leaf=_is_lora)))

    def mask(x):
        if _is_lora(x):
            nothing = jax.tree.map(lambda _: False, x)
            is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
            adapter = jax.tree.map(is_float, (x.a, x.b))
            return eqx.tree_at(lambda x: (x.a, x.b), nothing, adapter)
        if is_implicit(x) and not is_quantized(x):
            return jax.tree.map(
                mask, x, is_leaf=lambda y: y is not x and is_implicit(y)
            )
        return not adapters and not is_quantized(x) and eqx.is_inexact_array(x)

    return jax.tree.map(mask, model, is_leaf=is_implicit)


def _is_lora(x: Any) -> bool:
    return isinstance(x, LoraArray)
