"""A producer-consumer loop that XLA:CPU does not fuse.

XLA would fuse the producer of a piece into its consumer. A matmul would then recompute
each element many times, and a copy would compute all elements in one thread.
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
    """Run `for i in range(count): out = use(i, make(i), out)`, for `count` >= 1.

    Each piece is made one iteration before its use, and carried through the loop, so
    that XLA cannot fuse the two. `make` starts only after the previous `use` is done,
    so that the new piece reuses the buffer of the previous piece. Otherwise XLA would
    keep both, and copy each of them twice.
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
    """Return `i`, with a data dependency on `done`.

    XLA removes `lax.optimization_barrier` before it inserts copies. So this adds a zero
    that XLA cannot simplify.
    """
    first = jax.tree.leaves(done)[0]
    corner = lax.slice(first, (0,) * first.ndim, (1,) * first.ndim)
    byte = lax.bitcast_convert_type(corner, jnp.uint8).reshape(-1)[0]
    return i + (lax.population_count(byte) >> 4).astype(jnp.int32)
