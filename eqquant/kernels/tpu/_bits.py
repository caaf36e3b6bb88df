"""Codes of one bit, by masks: bits that stay where they are, or are shifted a little.

In a float of 8 bits, a bit that is set is a power of two then; which one, the
activation makes up for. In an integer of 4 bits it is 1. A weight is 1, and 2 less if
its bit is set: the 1 is a sum of the activation, for all weights of a row the same.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ._chips import Kind


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the bits of some planes of a byte are moved to, by a shift to the left of
    so many: which bit of a float, or of both halves of a byte."""

    planes: tuple[int, ...]
    shift: int
    bit: int


_places: dict[Kind, list[Place]] = {
    # Bits of the exponent: one alone is neither a sign nor a subnormal number.
    "bits of float8": [
        *(Place((plane,), 3, plane + 3) for plane in range(3)),
        *(Place((plane,), 0, plane) for plane in range(3, 7)),
        Place((7,), -1, 6),
    ],
    # The halves of a byte follow each other as rows of the operand. Bits that are worth
    # more than others would leave fewer to the activation.
    "bits of int4": [Place((plane, plane + 4), -plane, 0) for plane in range(4)],
}


class Bits:
    """Those of a byte, as operands of one kind."""

    def __init__(self, kind: Kind, dtype):
        self.places = _places[kind]
        self._every = 0x11111111 if kind == "bits of int4" else 0x01010101
        of_bits = [1 << place.bit for place in self.places]
        numbers = np.array(of_bits, np.uint8)
        if kind != "bits of int4":
            numbers = numbers.view(np.dtype(dtype))
        values = [float(number) for number in numbers]
        # What a bit is worth, and that relative to the least.
        self.one = min(values)
        self.powers = [value / self.one for value in values]

    def __call__(
        self, codes: Shaped[Array, "rows bytes"], index: int, format
    ) -> Shaped[Array, "rows bytes"]:
        place = self.places[index]
        words = pltpu.bitcast(codes, jnp.uint32)
        if place.shift > 0:
            words = words << place.shift
        elif place.shift < 0:
            words = words >> -place.shift
        mask = jnp.uint32(self._every << place.bit)
        return pltpu.bitcast(words & mask, jnp.int8)
