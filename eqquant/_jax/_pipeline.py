"""A loop whose parts XLA:CPU leaves apart.

Left to itself, XLA fuses what makes a piece into what uses it: an element is then made
over and over inside of a product, or by one thread where it is written to its place.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree, Shaped


Piece = TypeVar("Piece")
Out = TypeVar("Out")


def pipeline(
    count: int,
    make: Callable[[Int[Array, ""] | int], Piece],
    use: Callable[[Int[Array, ""] | int, Piece, Out], Out],
    out: Out,
) -> Out:
    """`for i in range(count): out = use(i, make(i), out)`, for `count` of 1 or more.

    A piece is made one iteration before it is used, and carried through the loop: the
    two cannot be fused. It is not made before the last use is over, so that it can take
    the place of the last piece: XLA would otherwise keep both, and copy each twice.
    """

    if count == 1:
        return use(0, make(0), out)

    def step(i, carry):
        piece, out = carry
        out = use(i, piece, out)
        return make(_after(out, i + 1)), out

    piece, out = lax.fori_loop(0, count - 1, step, (make(0), out))
    return use(count - 1, piece, out)


def _after(
    done: PyTree[Shaped[Array, "..."]], i: Int[Array, ""] | int
) -> Int[Array, ""]:
    """`i`, once `done` is known. `lax.optimization_barrier` is gone by the time that
    XLA decides on copies; this looks like arithmetic to it, and adds a zero."""
    first = jax.tree.leaves(done)[0]
    corner = lax.slice(first, (0,) * first.ndim, (1,) * first.ndim)
    byte = lax.bitcast_convert_type(corner, jnp.uint8).reshape(-1)[0]
    return i + (lax.population_count(byte) >> 4).astype(jnp.int32)
