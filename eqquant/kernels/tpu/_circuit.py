"""A table of 16 bytes by logic: for a part of the codes, where looking all of them up
is what takes longest.

The bits of codes are sorted, so that a word has the same bit of 32 codes, go through
gates, and are sorted again. In four registers of codes, that is 18 operations for each
of eight results.
"""

import functools as ft
import operator
import re

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped


_operators = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
# Of what to swap: by how many bits it is apart, and which bits.
_halves = 4, 0x0F0F0F0F
_quarters = 2, 0x33333333
_eighths = 1, 0x55555555


class Circuit:
    """Gates that make a byte of four bits: `2&5` is the and of two numbers, which are
    the four bits, the lowest first, all ones, and the results of the gates so far."""

    def __init__(self, gates: str, outputs: tuple[int, ...]):
        found = re.findall(r"(\d+)([&|^])(\d+)", gates)
        self._gates = [(int(a), _operators[op], int(b)) for a, op, b in found]
        self._outputs = outputs

    def __call__(self, bits: list, ones) -> list:
        """Of numbers whose bits belong to one code each."""
        values = [*bits, ones]
        for a, operate, b in self._gates:
            values.append(operate(values[a], values[b]))
        return [values[i] for i in self._outputs]

    def decode(
        self, codes: list[Shaped[Array, "32 128"]]
    ) -> list[list[Shaped[Array, "32 128"]]]:
        """In a kernel: four registers of bytes, which have two codes each, to those of
        the lower, and of the upper, in int8."""
        words = [pltpu.bitcast(part, jnp.uint32) for part in codes]
        bits = _sorted(words, _quarters, _eighths)
        out = self(bits, jnp.uint32(0xFFFFFFFF))
        out = _sorted(out, _quarters, _eighths, _halves)
        out = [pltpu.bitcast(part, jnp.int8) for part in out]
        return [out[:4], out[4:]]


def _sorted(words: list, *steps: tuple[int, int]) -> list:
    """Which word it is becomes which bit of it, and the other way round."""
    words = list(words)
    for step, mask in steps:
        for i in range(len(words)):
            if not i & step:
                a, b = words[i], words[i + step]
                differs = ((a >> step) ^ b) & jnp.uint32(mask)
                words[i], words[i + step] = a ^ (differs << step), b ^ differs
    return words


# By what they make of the codes in turn.
_circuits: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {
    # NF4, found by a search for few gates.
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
    """That for a table, if one is known."""
    known = _circuits.get(entries)
    return Circuit(*known) if known else None
