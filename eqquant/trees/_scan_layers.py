"""A scan over stacked layers whose quantized weights stay where they are."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._jax import typed
from ..arrays import as_views, ImplicitArray


@typed
def scan_layers(
    fn: Callable,
    init: Any,
    layers: Any,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    remat: bool = False,
) -> tuple[Any, Any]:
    """Scan over a stack of layers, and read quantized weights in place.

    It is `jax.lax.scan(fn, init, layers)`, with two differences. `layers` may contain
    objects that are no arrays, such as activation functions, so it can be a module. And
    each quantized array of a layer is a view: products read it where it is in the
    stack. `lax.scan` copies the codes of a layer out of the stack first, which for few
    rows takes longer than a product. (Inside of [`eqquant.quaxify`][], `lax.scan` also
    makes views.)

    A transformation that takes the layer as an argument, such as `jax.checkpoint(fn)`,
    makes copies again, so use `remat=True`. Results are the same in any case.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        make = lambda key: eqx.nn.MLP(64, 64, 128, depth=1, key=key)
        layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 12))
        layers = eqquant.quantize_tree(layers, "nf4", progress=False)


        @eqx.filter_jit
        def run(layers, x):
            step = lambda x, layer: (x + jax.vmap(layer)(x), None)
            return eqquant.trees.scan_layers(step, x, layers)[0]


        y = run(layers, jnp.ones((5, 64)))
        assert y.shape == (5, 64)
        ```

    **Arguments:**

    - `fn`: `fn(carry, layer) -> (carry, y)`.
    - `init`: the first carry, a pytree of arrays.
    - `layers`: a pytree. Each of its arrays has an axis of layers, of equal length, in
        front.
    - `reverse`, `unroll`: as in `jax.lax.scan`.
    - `remat`: whether the backward pass computes each layer again from its carry, as
        with `jax.checkpoint`.

    **Returns:**

    The last carry, and the stacked `y`.

    **Raises:**

    `ValueError` if the arrays of `layers` have no common first axis, or if the first
    axis of a quantized array is blocked.
    """
    length = _length(layers)
    arrays, static = eqx.partition(layers, eqx.is_array)

    def step(carry, inputs):
        index, arrays = inputs
        return fn(carry, as_views(eqx.combine(arrays, static), layers, index))

    step = jax.checkpoint(step) if remat else step
    inputs = jnp.arange(length, dtype=jnp.int32), arrays
    return lax.scan(step, init, inputs, reverse=reverse, unroll=unroll)


def _length(layers: Any) -> int:
    """Return the number of layers."""
    sizes = set()
    is_leaf = lambda x: isinstance(x, ImplicitArray)
    for path, leaf in jax.tree.leaves_with_path(layers, is_leaf=is_leaf):
        if not is_leaf(leaf) and not eqx.is_array(leaf):
            continue
        if not leaf.ndim or (is_leaf(leaf) and not leaf.is_scannable):
            raise ValueError(
                f"scan_layers: layers{jax.tree_util.keystr(path)} is {leaf!r}, which "
                "has no axis of layers in front. Stack layers with `eqx.filter_vmap`, "
                "and quantize another axis than the first."
            )
        sizes.add(leaf.shape[0])
    if len(sizes) != 1:
        raise ValueError(
            "scan_layers: the arrays of layers must have one length of their first "
            f"axis, got {sorted(sizes) or 'no arrays'}."
        )
    return sizes.pop()
