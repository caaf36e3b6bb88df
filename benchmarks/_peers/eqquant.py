"""eqquant itself."""

from . import Peer, Products
from ._jax import products


def load() -> Products:
    import eqquant
    import jax

    product = jax.jit(lambda x, q: x @ q.T)

    def make(format):
        def quantize(w):
            q = jax.block_until_ready(eqquant.quantize(w, format))
            return lambda x: product(x, q), q.nbytes

        return quantize

    formats = {
        "nf4": "nf4",
        "nf4, default precision": eqquant.NF4(precision="default"),
        "int8": "int8",
        "int8, default precision": eqquant.Int8(precision="default"),
        "ternary": "ternary",
        "binary": "binary",
    }
    return products("eqquant", {name: make(f) for name, f in formats.items()})


peer = Peer("eqquant", load)
