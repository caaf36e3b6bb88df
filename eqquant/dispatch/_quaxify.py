"""`quaxify`."""

import functools as ft
from collections.abc import Callable
from typing import get_args

from .._jax import typed
from ..arrays import OnMaterialise
from ._interpreter import Interpreter


@typed
def quaxify(fn: Callable, *, on_materialise: OnMaterialise = "warn") -> Callable:
    """Let a function that knows nothing of quantized arrays work on them.

    The function is traced with plain arrays of the same shapes in their place; what it
    does is then done again, primitive by primitive, with rules for quantized arrays.
    They are found in arguments, and in whatever the function holds: closures, bound
    methods, `functools.partial`, modules, globals. It composes with `jax.jit`,
    `jax.vmap`, `jax.grad`, `lax.scan`, `jax.checkpoint` and `jax.shard_map`, both
    outside and inside of the function.

    The layers of `eqx.nn` run without it.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp


        def attend(weight, x):
            return jnp.einsum("hdi,ti->htd", weight, x)


        weight = jax.random.normal(jax.random.key(0), (4, 16, 64))
        weight = eqquant.quantize(weight, "int8")
        heads = jax.jit(eqquant.quaxify(attend))(weight, jnp.ones((8, 64)))
        assert heads.shape == (4, 8, 16)
        ```

    **Arguments:**

    - `fn`: a function, or any callable.
    - `on_materialise`: what to do where a quantized array would have to be decoded in
        full: `"allow"` it, `"warn"` (once for each primitive and place), or raise an
        `"error"`, which is how to prove that it does not happen.

    **Returns:**

    A function of the same arguments. A result is a quantized array where one was only
    moved about or scaled.

    **Raises:**

    - `ValueError` if `on_materialise` is none of the three.
    - [`eqquant.MaterialiseError`][], when it is `"error"`.
    """
    if on_materialise not in get_args(OnMaterialise):
        raise ValueError(
            f"quaxify: on_materialise must be one of {get_args(OnMaterialise)}, got "
            f"{on_materialise!r}."
        )
    interpreter = Interpreter(on_materialise)

    def quaxified(*args, **kwargs):
        return interpreter.call(fn, *args, **kwargs)

    try:
        return ft.wraps(fn)(quaxified)
    except (AttributeError, TypeError):  # Not everything callable has a name.
        return quaxified
