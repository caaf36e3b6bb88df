"""A 16-entry byte table as a logic circuit, for chips on which lookups are the
bottleneck.

A bit transpose gives words that hold the same bit of 32 codes. The words pass through
gates and are transposed back. Four registers of codes take 18 operations for each of
the eight registers that they become.
"""

import functools as ft
import operator
import re

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped


_operators = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
# Steps of a bit transpose: the distance of the swapped bits, and a mask of the lower.
_halves = 4, 0x0F0F0F0F
_quarters = 2, 0x33333333
_eighths = 1, 0x55555555


class Circuit:
    """Gates that compute the eight bits of a table entry from the four bits of a code.

    In `gates`, `2&5` is the AND of values 2 and 5. Values 0 to 3 are the bits of the
    code, the lowest first. Value 4 is all ones. The results of the gates follow.
    `outputs` are the values of the eight bits, the lowest first.
    """

    def __init__(self, gates: str, outputs: tuple[int, ...]):
        found = re.findall(r"(\d+)([&|^])(\d+)", gates)
        self._gates = [(int(a), _operators[op], int(b)) for a, op, b in found]
        self._outputs = outputs

    def __call__(self, bits: list, ones) -> list:
        """Return the output words for words that hold one bit of each code."""
        values = [*bits, ones]
        for a, operate, b in self._gates:
            values.append(operate(values[a], values[b]))
        return [values[i] for i in self._outputs]

    def decode(
        self, codes: list[Shaped[Array, "32 128"]]
    ) -> list[list[Shaped[Array, "32 128"]]]:
        """Decode four registers of bytes with two codes each, in a kernel. Return the
        int8 entries of the low codes and of the high codes."""
        words = [pltpu.bitcast(part, jnp.uint32) for part in codes]
        bits = _transpose_bits(words, _quarters, _eighths)
        out = self(bits, jnp.uint32(0xFFFFFFFF))
        out = _transpose_bits(out, _quarters, _eighths, _halves)
        out = [pltpu.bitcast(part, jnp.int8) for part in out]
        return [out[:4], out[4:]]


def _transpose_bits(words: list, *steps: tuple[int, int]) -> list:
    """Swap the index of a word with the position of a bit in the word."""
    words = list(words)
    for step, mask in steps:
        for i in range(len(words)):
            if not i & step:
                a, b = words[i], words[i + step]
                difference = ((a >> step) ^ b) & jnp.uint32(mask)
                words[i], words[i + step] = a ^ (difference << step), b ^ difference
    return words


# Circuits by the entries of their tables.
_circuits: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {
    # NF4, found by a search that minimized the number of gates.
    (-124, -86, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124): (
        """
        1&2 0&5 3|6 4^7 5|8 0|9 1|2 7^10 11&12 3^13 6^11 0&14 15^16 9&16 2&14 18|19
        0^7 2&8 15|21 22^23 5^24 2^25 18|26 3^16 22^27 28^29 12^15 17|29 31^32
        """,
        (13, 24, 33, 27, 17, 30, 20, 8),
    ),
}


@ft.cache
def circuit_of(entries: tuple[int, ...]) -> Circuit | None:
    """Return the circuit for a table, or None if there is none."""
    known = _circuits.get(entries)
    return Circuit(*known) if known else None
