"""States of codes with a history: a level depends on a code and on the codes before it.

Consecutive codes share a byte, and several bytes form a window of the bit stream. So
one shift and one mask per code extract its state.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, UInt


@dataclasses.dataclass(frozen=True)
class LinearTable:
    """A table of levels whose index is linear in the bits of a state: bit `i` of the
    index is the parity of the bits that `masks[i]` selects.

    Native kernels on CPUs only support tables whose second half is the negative of the
    first half in reverse order."""

    masks: tuple[int, ...]
    levels: tuple[int, ...]

    def of_states(self, bits: int) -> np.ndarray:
        """Return the int8 level of each state of `bits` bits."""
        states = np.arange(2**bits)
        index = np.zeros(2**bits, int)
        for i, mask in enumerate(self.masks):
            parity = np.sum([(states & mask) >> bit & 1 for bit in range(bits)], 0) & 1
            index |= parity << i
        return np.array(self.levels, np.int8)[index]


def states_of(
    codes: Integer[Array, "*lead planes bytes"], bits: int, history: int, block: int
) -> UInt[Array, "*lead planes bytes"]:
    """Return the state of each code, in plane order.

    The highest bits of a state are the code. Below are the `history` codes before it,
    the oldest lowest. They are zero before the start of a block of `block` codes.
    """
    *lead, planes, size = codes.shape
    width = planes * bits  # The bits of the codes that share a byte.
    columns = math.ceil(history * bits / width)
    codes = codes.astype(jnp.uint32)
    column = codes[..., 0, :]
    for plane in range(1, planes):
        column = column | (codes[..., plane, :] << jnp.uint32(plane * bits))
    stream, place = column, np.arange(size) % (block // planes)
    for back in range(1, columns + 1):
        before = jnp.roll(column, back, -1)
        before = jnp.where(place >= back, before, jnp.uint32(0))
        stream = (stream << jnp.uint32(width)) | before
    first = columns * width - history * bits
    shifts = np.arange(first, first + width, bits, dtype=np.uint32)[:, None]
    shifts = shifts.reshape(*[1] * len(lead), planes, 1)
    mask = jnp.uint32(2 ** (bits * (history + 1)) - 1)
    return (stream[..., None, :] >> shifts) & mask
