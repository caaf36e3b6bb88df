"""The product of an activation and a thin matrix.

It computes `x @ w.T`. Under `jax.vmap` it stays a product of two matrices with more
rows, and so do its derivatives. `lax.dot_general` keeps mapped axes separate. Then the
gradient for `w` contracts several axes, and XLA:CPU transposes the cotangent first. If
one side of `w` is the rank of an adapter, that takes much longer than the product.
"""

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .._jax import has_explicit_axes, match_varying
from ..partition import dense_dot


rows_dot_p = Primitive("rows_dot")


def rows_dot(
    x: Float[Array, "m size"], w: Float[Array, "rows size"], precision
) -> Float[Array, "m rows"]:
    """Compute `x @ w.T`."""
    x, w = match_varying(x, w)
    if has_explicit_axes():  # Merged axes would be split differently.
        return _dot(x, w, precision=precision)
    return rows_dot_p.bind(x, w, precision=precision)


def _dot(x, w, *, precision):
    return dense_dot(x, w, (((1,), (1,)), ((), ())), precision=precision)


@rows_dot_p.def_abstract_eval
def _abstract_eval(x, w, *, precision):
    del precision
    return x.update(shape=(x.shape[0], w.shape[0]), weak_type=False)


rows_dot_p.def_impl(_dot)
mlir.register_lowering(rows_dot_p, mlir.lower_fun(_dot, multiple_results=False))


def _transpose_x(ct, x, w, *, precision):
    del x
    return rows_dot(ct, w.T, precision)


def _transpose_w(ct, x, w, *, precision):
    # XLA:CPU transposes the left operand, so the thin one is on the left.
    ct, x = match_varying(ct, x)
    rows, size = w.aval.shape
    left, right = (ct, x) if rows < size else (x, ct)
    out = lax.dot_general(left, right, (((0,), (0,)), ((), ())), precision=precision)
    return out if rows < size else out.T


ad.defbilinear(rows_dot_p, _transpose_x, _transpose_w)


def _batch(args, dims, *, precision):
    (x, w), (x_dim, w_dim) = args, dims
    if w_dim is None:
        x = jnp.moveaxis(x, x_dim, 0)
        out = rows_dot(x.reshape(-1, x.shape[-1]), w, precision)
        return out.reshape(*x.shape[:2], -1), 0
    w = jnp.moveaxis(w, w_dim, 0)
    if x_dim is None:
        out = rows_dot(x, w.reshape(-1, w.shape[-1]), precision)
        return out.reshape(x.shape[0], *w.shape[:2]), 1
    x = jnp.moveaxis(x, x_dim, 0)
    numbers = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(x, w, numbers, precision=precision), 0


batching.primitive_batchers[rows_dot_p] = _batch
