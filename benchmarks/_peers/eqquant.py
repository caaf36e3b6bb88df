"""eqquant itself."""

import functools as ft

from . import Peer, Products
from ._jax import products


def load() -> Products:
    import eqquant
    import jax

    product = jax.jit(lambda x, q: x @ q.T)

    def make(format, precision):
        def quantize(w):
            q = eqquant.quantize(w, format, precision=precision)
            q = jax.block_until_ready(q)
            return ft.partial(product, q=q), q.nbytes

        return quantize

    formats = {
        "nf4": ("nf4", "high"),
        "nf4, default precision": ("nf4", "default"),
        "int4": ("int4", "high"),
        "int4, default precision": ("int4", "default"),
        "int8": ("int8", "high"),
        "int8, default precision": ("int8", "default"),
        "ternary": ("ternary", "high"),
        "ternary, default precision": ("ternary", "default"),
        "binary": ("binary", "high"),
    }
    return products("eqquant", {name: make(*f) for name, f in formats.items()})


peer = Peer("eqquant", load)
