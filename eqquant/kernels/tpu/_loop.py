"""Loops in a kernel, unrolled as far as it pays.

JAX traces and lowers the body once, whatever the unroll factor is. The compiler takes
longer for each copy of the body, but it overlaps copies only within one iteration.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl


# The target number of instruction bundles per iteration. At the end of an iteration the
# pipeline drains, which takes about 50 cycles on v5e and 700 on v6e.
_bundles = 2**15


def loop(count: int, body: Callable[[Any, Any], Any], carry: Any = (), *, bundles: int):
    """Run `body(i, carry)` for `count` iterations of about `bundles` instruction
    bundles each."""
    if count < 2:
        return body(0, carry) if count else carry
    least = max(math.ceil(_bundles / max(bundles, 1)), 1)
    if least >= count:
        unroll = count
    else:  # Avoid a remainder loop if that at most doubles the number of copies.
        divisors = (
            n for n in range(least, min(2 * least, count) + 1) if count % n == 0
        )
        unroll = next(divisors, least)
    # int32 even if `jax_enable_x64` is set.
    return lax.fori_loop(np.int32(0), np.int32(count), body, carry, unroll=unroll)


def part_of(ref, axis: int, i: int | jax.Array, size: int):
    """Return a view of part `i` of a reference, of `size` entries along an axis. The
    last part is shorter if `i` is static."""
    if isinstance(i, int):
        part = pl.ds(i * size, min(size, ref.shape[axis] - i * size))
    else:
        part = pl.ds(pl.multiple_of(i * size, size), size)
    return ref.at[(*[slice(None)] * axis, part)]
