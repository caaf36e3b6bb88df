"""The function `quaxify`."""

import functools as ft
from collections.abc import Callable
from typing import get_args

from .._jax import check_one_of, typed
from ..arrays import OnMaterialise
from ._interpreter import Interpreter


@typed
def quaxify(fn: Callable, *, on_materialise: OnMaterialise = "warn") -> Callable:
    """Transform a function so that it accepts quantized arrays.

    The function is traced with plain arrays of the same shapes. The resulting jaxpr is
    then interpreted, with a rule for each primitive that has a quantized operand.
    Quantized arrays are found in arguments, closures, bound methods,
    `functools.partial`, modules and globals. `quaxify` composes with `jax.jit`,
    `jax.vmap`, `jax.grad`, `lax.scan`, `jax.checkpoint` and `jax.shard_map`, both
    outside and inside of the function.

    The layers of `eqx.nn` do not need `quaxify`.

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
    - `on_materialise`: the policy for operations that need a whole quantized array in
        floating point: `"allow"`, `"warn"` (once per primitive and location), or
        `"error"`, which proves that no such operation occurs.

    **Returns:**

    A function of the same arguments. Results of structural operations and scaling are
    quantized arrays.

    **Raises:**

    - `ValueError` for any other value of `on_materialise`.
    - [`eqquant.MaterialiseError`][] if the policy is `"error"` and an operation needs a
        whole array.
    """
    check_one_of("quaxify", "on_materialise", on_materialise, get_args(OnMaterialise))
    interpreter = Interpreter(on_materialise)

    def quaxified(*args, **kwargs):
        return interpreter.call(fn, *args, **kwargs)

    try:
        return ft.wraps(fn)(quaxified)
    except (AttributeError, TypeError):  # Some callables have no name.
        return quaxified
