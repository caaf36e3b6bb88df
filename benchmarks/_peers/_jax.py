"""Code shared by the libraries for JAX."""

import importlib.metadata

from . import Products, Quantize


def dense(w):
    import jax
    from jax import lax

    # The weight is the left operand, because XLA:CPU is slow at `x @ w.T` with one row.
    product = jax.jit(lambda x, w: lax.dot_general(w, x, (((1,), (1,)), ((), ()))).T)
    return lambda x: product(x, w), w.nbytes


def products(package: str, quantized: dict[str, Quantize]) -> Products:
    import jax
    import jax.numpy as jnp

    version = f"{importlib.metadata.version(package)}, jax {jax.__version__}"
    return Products(version, dense, quantized, put=jnp.asarray)
