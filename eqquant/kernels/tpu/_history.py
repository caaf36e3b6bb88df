"""Compute the table indices of codes with a history.

A bit of an index is the XOR of bits of the row before the end of a code. So the bits
for all codes are an XOR of the bit stream of the row with delayed copies of it. The
codes of a byte are in slots, the first in the lowest bits. A delay by whole bytes moves
lanes, or sublanes if codes are transposed. The history is zero before the start of a
block.
"""

import functools as ft
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int8, UInt8

from ...formats import Format
from ._tiles import bits_of, block_bytes, planes_of


_whole = 0, 8, 16  # Delays by whole bytes.


class _Plan(NamedTuple):
    """How to compute the index bits of a format.

    - `places`: for each bit of an index, a stream and a bit of its slots. The slots of
        all streams, the first stream lowest, are the index.
    - `streams`: for each stream, its terms: a delay in bits, and the bits of slots to
        which the delayed copy is added.
    - `funnels`: delays for which bits cross bytes. Shifts within a byte yield all other
        delays, from these and from delays by whole bytes.
    """

    places: tuple[tuple[int, int], ...]
    streams: tuple[dict[int, frozenset[int]], ...]
    funnels: tuple[int, ...]

    @property
    def ready(self) -> tuple[int, ...]:
        """The delays that are not shifts of others."""
        return *_whole, *self.funnels


def _gives(source: int, delay: int, bits: frozenset[int], width: int) -> bool:
    """Return whether a shift of delay `source` has the given bits of all slots of
    another delay."""
    first = [bit - (delay - source) for bit in bits]
    return source == delay or all(0 <= bit < width for bit in first)


@ft.cache
def _plan_of(format: Format) -> _Plan:
    """Return the plan with the fewest operations, among all places of index bits."""
    width, table = bits_of(format), format.linear_table
    assert table is not None
    offsets = [_offsets(mask, format) for mask in table.masks]
    # Tables of 32 entries have no unused index bits: some chips look them up faster.
    count = max(len(offsets), 5 if len(offsets) <= 5 else 7)
    slots = [divmod(i, width) for i in range(count)]
    plans = [
        _with_places(places, offsets, width)
        for places in itertools.permutations(slots, len(offsets))
        if all(bit >= max(o) for (_, bit), o in zip(places, offsets, strict=True))
    ]
    return min(plans, key=lambda plan: _cost(plan, width))


def _offsets(mask: int, format: Format) -> list[int]:
    """Return the positions of the bits of a mask, relative to the slot of the code."""
    width, bits = bits_of(format), format.bits
    found = []
    for i in range(bits * (format.history + 1)):
        if mask >> i & 1:
            code, bit = divmod(i, bits)
            found.append((code - format.history) * width + width - bits + bit)
    return found


def _with_places(places, offsets: list[list[int]], width: int) -> _Plan:
    streams = [{} for _ in range(1 + max(stream for stream, _ in places))]
    for (stream, bit), positions in zip(places, offsets, strict=True):
        for position in positions:
            bits = streams[stream].get(bit - position, frozenset())
            streams[stream][bit - position] = bits | {bit}
    left = {}
    for stream in streams:
        for delay, bits in stream.items():
            left[delay] = left.get(delay, frozenset()) | bits
    # Choose the funnel that serves most delays, until all are served.
    funnels, choices = [], set(range(_whole[-1])) - set(_whole)
    for known in _whole:
        left = {d: b for d, b in left.items() if not _gives(known, d, b, width)}
    while left:
        served = {
            i: [d for d, bits in left.items() if _gives(i, d, bits, width)]
            for i in choices
        }
        best = max(served, key=lambda i: (len(served[i]), i in left))
        funnels.append(best)
        left = {d: b for d, b in left.items() if d not in served[best]}
    return _Plan(tuple(places), tuple(streams), tuple(funnels))


def _cost(plan: _Plan, width: int) -> int:
    """Return about how many vector operations compute the streams."""
    shifts = {delay for stream in plan.streams for delay in stream} - {*plan.ready}
    cost = 5 * len(plan.funnels) + len(shifts)
    for stream in plan.streams:
        every = frozenset().union(*stream.values())
        cost += sum(1 + (bits != every) for bits in stream.values())
    return cost


def table_of(format: Format) -> np.ndarray:
    """Return the level of each index that [`indices`][] returns."""
    width = bits_of(format)
    table, places = format.linear_table, _plan_of(format).places
    assert table is not None
    positions = [stream * width + bit for stream, bit in places]
    index = np.arange(2 ** (max(positions) + 1))
    entry = sum((index >> at & 1) << i for i, at in enumerate(positions))
    return np.array(table.levels, np.int8)[entry]


def indices(
    codes: UInt8[Array, "rows bytes"], format: Format, axis: int = 1
) -> list[Int8[Array, "rows bytes"]]:
    """Return the index of each code, for each plane. `codes` starts with a block.

    Bytes of a row are along `axis`.
    """
    plan, width = _plan_of(format), bits_of(format)
    delayed = (_Delays if axis else _DelaysInWords)(codes, format, plan)
    streams = []
    for terms in plan.streams:
        every = frozenset().union(*terms.values())
        stream = None
        for delay, bits in terms.items():
            term = delayed(delay, bits)
            term = term if bits == every else term & _in_all_slots(bits, width)
            stream = term if stream is None else stream ^ term
        streams.append((stream, every))

    def index(plane: int):
        parts = []
        for i, (stream, bits) in enumerate(streams):
            mask = sum(1 << i * width + bit for bit in bits)
            part = _shifted(stream, (i - plane) * width)
            parts.append(part & jnp.uint32(mask * 0x01010101))
        return pltpu.bitcast(ft.reduce(jnp.bitwise_or, parts), jnp.int8)

    return [index(plane) for plane in range(planes_of(format))]


class _Delays:
    """Delayed copies of the bit streams of rows, in words of four rows."""

    _axis, _bytes = 1, 1  # The axis of a row, and its bytes in a word.

    def __init__(self, codes: UInt8[Array, "rows bytes"], format: Format, plan: _Plan):
        self._words = pltpu.bitcast(codes, jnp.uint32)
        self._width, self._plan = bits_of(format), plan
        index = lax.broadcasted_iota(jnp.int32, self._words.shape, self._axis)
        self._place = lax.rem(index, jnp.int32(block_bytes(format) // self._bytes))
        self._ready = {}

    def __call__(self, delay: int, bits: frozenset[int]) -> Array:
        """Return a copy in which the given bits of each slot are those `delay` bits
        before. Other bits are arbitrary."""
        sources = sorted(self._plan.ready, key=lambda source: source != delay)
        source = next(s for s in sources if _gives(s, delay, bits, self._width))
        if source not in self._ready:
            self._ready[source] = self._compute(source)
        return _shifted(self._ready[source], delay - source)

    def _compute(self, delay: int) -> Array:
        whole, part = divmod(delay, 8)
        if part:
            before, first = 0xFF >> (8 - part), frozenset()
            now, earlier = self(whole * 8, first), self((whole + 1) * 8, first)
            now = (now << part) & jnp.uint32((before ^ 0xFF) * 0x01010101)
            return now | (earlier >> (8 - part)) & jnp.uint32(before * 0x01010101)
        return self._moved(whole) if whole else self._words

    def _moved(self, by: int) -> Array:
        """Move words along their rows. Zeros enter at the starts of blocks."""
        moved = pltpu.roll(self._words, by, self._axis)
        return jnp.where(self._place >= by, moved, jnp.uint32(0))


class _DelaysInWords(_Delays):
    """Delayed copies of the bit streams of rows, in words of four bytes of a row."""

    _axis, _bytes = 0, 4

    def _compute(self, delay: int) -> Array:
        if not delay:
            return self._words
        return (self._words << delay) | (self._before >> (32 - delay))

    @ft.cached_property
    def _before(self) -> Array:
        return self._moved(1)


def _shifted(words: Array, by: int) -> Array:
    if by > 0:
        return words << by
    return words >> -by if by else words


def _in_all_slots(bits: frozenset[int], width: int) -> Array:
    byte = sum(1 << slot + bit for slot in range(0, 8, width) for bit in bits)
    return jnp.uint32(byte * 0x01010101)
