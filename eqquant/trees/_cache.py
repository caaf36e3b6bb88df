"""Quantize caches of keys and values."""

from typing import Any

import jax

from .._jax import typed
from ..arrays import is_implicit, quantize, QuantizedArray, rotated, RotatedArray
from ..formats import Format
from ..kernels import as_compute, Compute
from ._sites import Tree


@typed
def quantize_cache(
    cache: Tree,
    format: Format | str = "int8",
    *,
    axis: Any = -1,
    rotate: bool = False,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> Tree:
    """Quantize a cache of keys and values, so that a token can be replaced without
    decoding the others.

    Model code does not change. It writes tokens with `jax.lax.dynamic_update_slice` or
    `.at[...].set(...)`, and multiplies by keys and values, under [`eqquant.quaxify`][].

    With `rotate`, keys and values are rotated by Hadamard matrices before they are
    rounded, which spreads the large channels of keys (QuaRot, arXiv 2404.00456). A
    product rotates the queries, and rotates its result back: `(q H) (k H) = q k`.
    Quantize keys after their position embedding.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        zeros = jnp.zeros((4, 512, 64))  # (heads, tokens, size)
        cache = {"keys": zeros, "values": zeros}
        cache = eqquant.trees.quantize_cache(cache, "int4", rotate=True)

        def step(cache, i, key, query):
            keys = jax.lax.dynamic_update_index_in_dim(cache["keys"], key, i, 1)
            return {**cache, "keys": keys}, jnp.einsum("hd,htd->ht", query, keys)

        run = jax.jit(eqquant.quaxify(step, on_materialise="error"), donate_argnums=0)
        cache, scores = run(cache, 0, *jnp.ones((2, 4, 64)))
        assert abs(scores[:, 0] - 64).max() < 1
        ```

    **Arguments:**

    - `cache`: a pytree of float arrays. Other leaves are kept.
    - `format`: as in [`eqquant.quantize`][]. Scales run along `axis`, so each token and
        head has its own.
    - `axis`: the axis of the head size, in every array, or a pytree of axes with the
        structure of `cache` or of its top. `-2` for keys that are stored as columns,
        `(..., size, tokens)`.
    - `rotate`: whether to rotate. The block is the largest power of two that divides
        the head size.
    - `precision`, `activations`, `compute`: as in [`eqquant.quantize`][].

    **Returns:**

    The cache, with a [`eqquant.QuantizedArray`][] for each array, or with `rotate` an
    [`eqquant.arrays.RotatedArray`][].

    **Raises:**

    The errors of [`eqquant.quantize`][]; `ValueError` if `rotate` is set and the head
    size is odd, or if `axis` does not have the structure of `cache`.
    """
    compute = as_compute(compute, precision, activations)

    def quantize_one(array: Any, axis: int) -> Any:
        if is_implicit(array) or not jax.numpy.issubdtype(
            getattr(array, "dtype", bool), jax.numpy.floating
        ):
            return array
        if not rotate:
            return quantize(array, format, axis=axis, compute=compute)
        turned, block = rotated(array, axis)
        if block == 1:
            raise ValueError(
                "quantize_cache: rotate needs an even head size, but axis "
                f"{axis} of an array of shape {array.shape} has "
                f"{array.shape[axis]} values. Pass rotate=False, or another axis."
            )
        base = quantize(turned, format, axis=axis, compute=compute)
        base = base.with_dtype(array.dtype)
        assert isinstance(base, QuantizedArray)
        return RotatedArray(base, block)

    def quantize_below(axis: Any, part: Any) -> Any:
        leaf = lambda array: quantize_one(array, axis)
        return jax.tree.map(leaf, part, is_leaf=is_implicit)

    try:
        jax.tree.map(lambda *_: None, axis, cache)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"quantize_cache: axis must be an integer, or a pytree of integers with "
            f"the structure of cache, got {axis!r}."
        ) from error
    return jax.tree.map(quantize_below, axis, cache)
