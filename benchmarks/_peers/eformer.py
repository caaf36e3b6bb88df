"""eformer, for JAX."""

import functools as ft

from . import Peer, Products
from ._jax import products


def load() -> Products:
    import jax
    from eformer.jaximus import implicit
    from eformer.ops.quantization import Array8B, ArrayNF4

    product = jax.jit(implicit(lambda x, q: x @ q))

    def with_size(q):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(q))
        return ft.partial(product, q=q), size

    # eformer's weights have shape (columns, rows) and need no transpose.
    def nf4(w):
        return with_size(jax.block_until_ready(ArrayNF4.quantize(w.T, block_size=64)))

    def int8(w):
        return with_size(jax.block_until_ready(Array8B.quantize(w.T, axis=0)))

    return products("eformer", {"nf4": nf4, "int8": int8})


peer = Peer("eformer", load, packages=("eformer",))
