"""Dropout in adapters."""

from jaxtyping import PRNGKeyArray

from .._jax import typed
from ..arrays import LoraArray
from ..trees import Tree
from ._keys import renew_keys, split_key


@typed
def with_dropout_key(model: Tree, key: PRNGKeyArray | None) -> Tree:
    """Change the key for the dropout of adapters.

    Call it in the loss, with a new key for each step. For inference, `None` switches
    dropout off. [`eqquant.lora_tree`][] leaves it on, as layers of `eqx.nn` do.

    Each adapter, and each layer of a stack, gets a key of its own. The mask has the
    shape of the activation in a product. So the rows of a batch that is multiplied at
    once have masks of their own. Calls that are mapped over, or made one after the
    other, share a mask and drop the same features. To drop others for each example,
    call this inside of the mapped function, with a key for each example, as below. The
    tokens of an example, if layers map over them, still share a mask.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        model = eqquant.lora_tree(model, 8, key=jax.random.key(1), dropout=0.1)


        @eqx.filter_grad
        def gradient(model, x, keys):
            def one(x, key):
                return eqquant.training.with_dropout_key(model, key)(x)

            return jnp.sum(jax.vmap(one)(x, keys))


        keys = jax.random.split(jax.random.key(2), 4)  # others for each step
        gradient(model, jnp.ones((4, 64)), keys)
        inference = eqquant.training.with_dropout_key(model, None)
        ```

    **Arguments:**

    - `model`: a pytree with adapters that have dropout.
    - `key`: a random key, or `None`.

    **Returns:**

    The same pytree with new keys.

    **Raises:**

    `ValueError` if a key is given, and no adapter has dropout.
    """

    def renew(x, key_of):
        if not isinstance(x, LoraArray) or not x.dropout:
            return x
        lead = x.a.shape[: x.a.ndim - 1 - len(x.in_axes)]
        return x.replace(key=split_key(key_of(), lead))

    return renew_keys(
        renew,
        model,
        key,
        "with_dropout_key: no adapter in model has dropout: pass dropout to lora_tree.",
    )
