"""Move the bits of blocks of bytes to another layout on CPUs, by a native kernel.

The kernel executes a list of moves. The list is derived from the NumPy function that
defines the new layout, so that no layout has two definitions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from ._library import load


_largest = 64  # The bytes of a move are a power of two, up to this number.


class Layout(NamedTuple):
    """The moves from a block to its new layout. The bits of a new block are bits of
    `start`, flipped where moved bits are set.

    - `moves`: the first byte, the first byte of the result, the number of bytes, the
        shift to the left, and the mask of the shifted bits.
    """

    from_bytes: int
    start: UInt8[np.ndarray, " to_bytes"]
    moves: Int32[np.ndarray, "moves 5"]


def find_layouts(
    fn: Callable[[UInt8[np.ndarray, "blocks n"]], Sequence[np.ndarray]],
    from_bytes: int,
) -> list[Layout] | None:
    """Return the layouts of a function that makes several arrays of bytes `(blocks, m)`
    of blocks of bytes. Return `None` if it does more than moving and flipping bits, or
    if there is no native kernel."""
    if isinstance(load(), str):
        return None
    # Change one bit at a time.
    bits = np.packbits(np.eye(8 * from_bytes, dtype=bool), 1, bitorder="little")
    starts = fn(np.zeros((1, from_bytes), np.uint8))
    layouts = [
        _find(changed, start[0], from_bytes)
        for changed, start in zip(fn(bits), starts, strict=True)
    ]
    blocks = np.random.default_rng(0).integers(0, 256, (256, from_bytes), np.uint8)
    is_same = all(
        np.array_equal(relayout(layout, blocks), expected)
        for layout, expected in zip(layouts, fn(blocks), strict=True)
    )
    return layouts if is_same else None


def _find(changed: np.ndarray, start: np.ndarray, from_bytes: int) -> Layout:
    """Return the layout for the results of changing each bit of a block of zeros."""
    flips: Any = changed ^ start
    flipped = np.unpackbits(flips, axis=1, bitorder="little")
    masks: dict[tuple[int, int, int], int] = {}
    for source, target in np.argwhere(flipped).tolist():
        place = source // 8, target // 8, target % 8 - source % 8
        masks[place] = masks.get(place, 0) | 1 << target % 8
    moves = np.array(_moves(masks), np.int32).reshape(-1, 5)
    return Layout(from_bytes, np.ascontiguousarray(start), moves)


def _moves(masks: dict[tuple[int, int, int], int]) -> list[tuple[int, ...]]:
    """Join moves of single bytes that differ by one byte."""
    moves: list[tuple[int, ...]] = []
    left = dict(masks)
    for first, second, shift in sorted(masks):
        mask = left.get((first, second, shift))
        if mask is None:
            continue
        run = 1
        while left.get((first + run, second + run, shift)) == mask and run < _largest:
            run += 1
        run = 1 << run.bit_length() - 1
        for i in range(run):
            del left[first + i, second + i, shift]
        moves.append((first, second, run, shift, mask))
    return moves


def relayout(
    layout: Layout,
    blocks: UInt8[np.ndarray, "blocks n"],
    out: UInt8[np.ndarray, "blocks m"] | None = None,
) -> UInt8[np.ndarray, "blocks m"]:
    """Return the blocks in the new layout, in the memory of `out` if it is given. Other
    threads can run meanwhile."""
    library = load()
    assert not isinstance(library, str) and blocks.shape[-1] == layout.from_bytes
    blocks = np.ascontiguousarray(blocks)
    shape = len(blocks), len(layout.start)
    if out is None:
        out = np.empty(shape, np.uint8)
    assert out.shape == shape and out.dtype == np.uint8 and out.flags.c_contiguous
    done = library.relayout(
        blocks.ctypes.data,
        layout.from_bytes,
        len(blocks),
        out.ctypes.data,
        len(layout.start),
        layout.start.ctypes.data,
        layout.moves.ctypes.data,
        len(layout.moves),
    )
    assert done, layout
    return out
