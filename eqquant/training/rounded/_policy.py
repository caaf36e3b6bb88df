"""The policy for `jax.checkpoint` that keeps the codes of the forward pass."""

from typing import Any

import jax

from ..._jax import typed
from ._products import NAME


_by_name = jax.checkpoint_policies.save_only_these_names(NAME)


@typed
def save_quantized(primitive: Any, *args: Any, **params: Any) -> Any:
    """Save the codes of low-precision products, for `jax.checkpoint` and
    `eqx.filter_checkpoint`.

    The backward pass then uses the codes of the forward pass. Without this policy it
    computes activations again, and rounds them again.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.Linear(64, 64, key=jax.random.key(0))
        model = eqquant.training.low_precision(model, "int8")
        policy = eqquant.training.save_quantized
        run = eqx.filter_checkpoint(lambda m, x: jax.nn.gelu(m(x)), policy=policy)
        eqx.filter_grad(lambda m: run(m, jax.numpy.ones(64)).sum())(model)
        ```
    """
    return _by_name(primitive, *args, **params)
