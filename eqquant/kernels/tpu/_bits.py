"""Binary codes as operands: a mask selects one bit of each byte, in place or shifted.

As a float8, a set bit is a power of two. The activation is scaled to compensate for the
exponent. As an int4, a set bit is 1. A weight is 1 minus 2 times its bit: the 1
contributes the sum of the activation, which all weights of a row share.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ._chips import Kind


@dataclasses.dataclass(frozen=True)
class BitShift:
    """The left shift that moves the bits of `planes` to bit `bit` of a float8, or of
    each half of a byte."""

    planes: tuple[int, ...]
    shift: int
    bit: int


_shifts: dict[Kind, list[BitShift]] = {
    # Bits of the exponent: a single set bit is neither a sign nor a subnormal.
    "bits of float8": [
        *(BitShift((plane,), 3, plane + 3) for plane in range(3)),
        *(BitShift((plane,), 0, plane) for plane in range(3, 7)),
        BitShift((7,), -1, 6),
    ],
    # The halves of a byte become adjacent rows of the operand. All bits are moved to
    # bit 0: different powers of two would leave fewer bits to the activation.
    "bits of int4": [BitShift((plane, plane + 4), -plane, 0) for plane in range(4)],
}


class Bits:
    """Extract the bits of a byte as operands of one kind.

    - `smallest`: the smallest value of a set bit.
    - `powers`: the value of a set bit of each operand, relative to `smallest`.
    """

    def __init__(self, kind: Kind, dtype):
        self.shifts = _shifts[kind]
        self._ones = 0x11111111 if kind == "bits of int4" else 0x01010101
        bits = np.array([1 << shift.bit for shift in self.shifts], np.uint8)
        if kind != "bits of int4":
            bits = bits.view(np.dtype(dtype))
        values = [float(bit) for bit in bits]
        self.smallest = min(values)
        self.powers = [value / self.smallest for value in values]

    def __call__(
        self, codes: Shaped[Array, "rows bytes"], index: int, format
    ) -> Shaped[Array, "rows bytes"]:
        shift = self.shifts[index]
        words = pltpu.bitcast(codes, jnp.uint32)
        if shift.shift > 0:
            words = words << shift.shift
        elif shift.shift < 0:
            words = words >> -shift.shift
        mask = jnp.uint32(self._ones << shift.bit)
        return pltpu.bitcast(words & mask, jnp.int8)
