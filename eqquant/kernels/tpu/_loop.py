"""Loops in a kernel, unrolled as far as it pays.

JAX traces and lowers the body once, however often it is unrolled. The compiler takes
longer for every copy, but overlaps what copies do only within the same iteration.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl


# How many bundles of instructions an iteration should have, about. At its end the last
# results are waited for: some 50 cycles on v5e, 700 on v6e.
_bundles = 2**15


def loop(count: int, body: Callable[[Any, Any], Any], carry: Any = (), *, bundles: int):
    """`body(i, carry)` so many times, each about so many bundles of instructions."""
    if count < 2:
        return body(0, carry) if count else carry
    least = max(math.ceil(_bundles / max(bundles, 1)), 1)
    if least >= count:
        unroll = count
    else:  # Without a rest, if that takes no more than twice as many copies.
        whole = (n for n in range(least, min(2 * least, count) + 1) if count % n == 0)
        unroll = next(whole, least)
    # In 32 bits, whatever the default is.
    return lax.fori_loop(np.int32(0), np.int32(count), body, carry, unroll=unroll)


def part_of(ref, axis: int, i: int | jax.Array, size: int):
    """Part `i` of so many entries along an axis: a reference to it. The last may have
    fewer, if `i` is known."""
    if isinstance(i, int):
        part = pl.ds(i * size, min(size, ref.shape[axis] - i * size))
    else:
        part = pl.ds(pl.multiple_of(i * size, size), size)
    return ref.at[(*[slice(None)] * axis, part)]
