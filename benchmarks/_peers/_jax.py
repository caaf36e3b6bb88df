"""Code shared by the libraries for JAX."""

import functools as ft
import importlib.metadata
from collections.abc import Callable, Sequence

from . import Products, Quantize


def dense(w):
    import jax
    import jax.numpy as jnp
    from jax import lax

    w = jnp.array(w, copy=True)  # Each weight of a ring has its own memory.

    # The weight is the left operand, because XLA:CPU is slow at `x @ w.T` with one row.
    product = jax.jit(lambda x, w: lax.dot_general(w, x, (((1,), (1,)), ((), ()))).T)
    return ft.partial(product, w=w), w.nbytes


def join(matmuls: Sequence[ft.partial]) -> Callable:
    """Join matmuls, whose keyword arguments are their weights."""
    import jax

    @jax.jit
    def in_turn(first, weights):
        x = first
        for weight in weights:
            y = matmuls[0].func(x, **weight)
            # Otherwise XLA may run several products at once. With `x += ...`, XLA would
            # add the results of all earlier products again for each one.
            x = first + 0 * y[:, :1]
        return y

    return ft.partial(in_turn, weights=[matmul.keywords for matmul in matmuls])


def products(package: str, quantized: dict[str, Quantize]) -> Products:
    import jax
    import jax.numpy as jnp

    version = f"{importlib.metadata.version(package)}, jax {jax.__version__}"
    return Products(version, dense, quantized, put=jnp.asarray, join=join)
