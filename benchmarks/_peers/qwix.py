"""qwix, for JAX."""

import functools as ft

from . import Peer, Products
from ._jax import products


def load() -> Products:
    import jax
    import jax.numpy as jnp
    import qwix

    contract = (((1,), (1,)), ((), ()))

    @jax.jit
    def weight_only(x, q):
        return qwix.dot_general(x, q, contract)

    @jax.jit
    def int8_activations(x, q):
        return qwix.dot_general(
            qwix.quantize(x, jnp.int8, channelwise_axes=(0,)), q, contract
        )

    def make(product, qtype, **kwargs):
        encode = jax.jit(lambda w: qwix.quantize(w, qtype, **kwargs))

        def quantize(w):
            q = jax.block_until_ready(encode(w))
            size = q.qvalue.nbytes + q.scale.nbytes
            return ft.partial(product, q=q), size

        return quantize

    blocks = dict(channelwise_axes=(0,), tiled_axes={1: 64})
    return products(
        "qwix",
        {
            "nf4": make(weight_only, "nf4", **blocks),
            "int8": make(weight_only, jnp.int8, channelwise_axes=(0,)),
            "int8, int8 activations": make(
                int8_activations, jnp.int8, channelwise_axes=(0,)
            ),
        },
    )


peer = Peer("qwix", load, packages=("qwix",))
