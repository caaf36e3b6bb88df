"""int8 activations in training."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._jax import typed
from ..primitives import straight_rounded


@typed
def round_activations(
    x: Float[Array, "..."] | Float[np.ndarray, "..."], *, axis: int = -1
) -> Float[Array, "..."]:
    """Round activations to int8, with the gradient of the identity.

    Each row along `axis` (each token) has its own scale, `absmax / 127`. This is the
    dynamic per-token quantization of W8A8. Products with `activations="int8"` do this.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        x = jax.random.normal(jax.random.key(0), (8, 256))
        rounded = eqquant.training.round_activations(x)
        assert jnp.unique(rounded[0]).size <= 255
        gradient = jax.grad(lambda x: eqquant.training.round_activations(x).sum())(x)
        assert (gradient == 1).all()
        ```

    **Arguments:**

    - `x`: a floating-point array.
    - `axis`: the contracted axis of the product.

    **Returns:**

    An array of the shape and dtype of `x`.
    """
    x = jnp.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"round_activations: axis must be between {-x.ndim} and {x.ndim - 1} for "
            f"an array of {x.ndim} axes, got {axis}."
        )
    return straight_rounded(x, (axis,))
