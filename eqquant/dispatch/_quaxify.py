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

    `eqx.nn` layers other than convolutions need none of this.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        conv = eqx.nn.Conv2d(16, 32, 3, key=jax.random.key(0))
        conv = eqquant.quantize_tree(conv, "int8")
        images = jax.random.normal(jax.random.key(1), (8, 16, 28, 28))
        out = jax.jit(eqquant.quaxify(jax.vmap(conv)))(images)
        assert out.shape == (8, 32, 26, 26)
        ```

    **Arguments:**

    - `fn`: a function, or any callable.
    - `on_materialise`: what to do where a quantized array would have to be decoded in
        full: `"allow"` it, `"warn"` (once for each primitive and place), or raise an
        `"error"`, which is how to prove that it does not happen.

    **Returns:**

    A function of the same arguments. Results may be quantized, where all that happened
    to a quantized array is that it was moved about.

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
