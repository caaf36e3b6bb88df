"""The inputs of attention: positions, masks, and keys and values of earlier tokens."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class View(eqx.Module):
    """The rotations of positions and the attention mask of a layer."""

    cos: Float[Array, "length half"]
    sin: Float[Array, "length half"]
    mask: Bool[Array, "batch length keys"]  # A batch of 1 broadcasts.

    def rotate(
        self, x: Float[Array, "batch heads length size"]
    ) -> Float[Array, "batch heads length size"]:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        rotated = (a * self.cos - b * self.sin, b * self.cos + a * self.sin)
        return jnp.concatenate(rotated, -1).astype(x.dtype)


class Cache(eqx.Module):
    """Keys and values of the tokens so far, of one layer or of all layers, stacked.

    This code only replaces rows and multiplies, so that keys and values may be
    quantized arrays. The axis `heads` covers the heads of all sequences; with two
    axes, XLA would copy the cache to merge them. Keys are columns, which products with
    queries read faster.
    """

    keys: Float[Array, "*layers heads size capacity"]
    values: Float[Array, "*layers heads capacity size"]
    # How attention reads a stack when it adds a token: by a slice for all keys and for
    # all values of a layer, in pieces, or by a kernel for TPUs. XLA:CPU copies slices.
    reads: Literal["slices", "pieces", "kernel"] = eqx.field(
        static=True, default="slices"
    )

    def append(self, keys, values, layer, start):
        """Write new tokens of one layer, in place if the cache is donated.

        Returns the new cache, and all keys and values of the layer.
        """

        def write(old, new, *first):
            new = new.astype(old.dtype)
            if layer is None:
                return lax.dynamic_update_slice(old, new, first)
            return lax.dynamic_update_slice(old, new[None], (layer, *first))

        def read(x):
            if layer is None:
                return x
            return lax.dynamic_index_in_dim(x, layer, keepdims=False)

        keys = write(self.keys, keys, 0, 0, start)
        values = write(self.values, values, 0, start, 0)
        cache = Cache(keys, values, self.reads)
        return cache, read(cache.keys), read(cache.values)
