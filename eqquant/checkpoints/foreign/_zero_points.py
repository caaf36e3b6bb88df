"""Weights of a few bits with zero points: `value = (code - zero) * scale`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ...formats import Format, Int2, Int3, Int4, Int8
from ._entry import Entry, from_codes, from_levels, NotHeld
from ._parts import Parts


_formats: dict[int, type[Format]] = {2: Int2, 3: Int3, 4: Int4, 8: Int8}
BITS = tuple(_formats)
SCALE_DTYPES = ("float16", "bfloat16", "float32")


def block_order(parts: Parts, name: str, blocks: int) -> np.ndarray:
    """The block of each column, read and checked."""
    found = parts.read(name)
    if np.any((found < 0) | (found >= blocks)):
        raise ValueError(
            f"{parts.where} has groups in {name!r} from {found.min()} to "
            f"{found.max()}, but there are {blocks}."
        )
    return found


@dataclasses.dataclass(frozen=True)
class ZeroPointWeight:
    """A matrix, a row for each output.

    **Fields:**

    - `library`: that packed it.
    - `where`, `shape`, `dtype`, `parts`: as in [`Entry`][].
    - `bits`, `block`: of a code, and how many of a row share a scale; None for all.
    - `symmetric`: whether every zero should be the code in the middle.
    - `codes`: reads `(rows, columns)`, uint8.
    - `scales`: reads `(rows, blocks)`.
    - `zeros`: reads `(rows, blocks)`, integers.
    - `order`: reads the block of each column; None if they are in order.
    """

    library: str
    where: str
    shape: tuple[int, int]
    dtype: np.dtype
    parts: tuple[str, ...]
    bits: int
    block: int | None
    symmetric: bool
    codes: Callable[[], np.ndarray]
    scales: Callable[[], np.ndarray]
    zeros: Callable[[], np.ndarray]
    order: Callable[[], np.ndarray] | None = None

    def entry(self) -> Entry:
        try:
            kind = f"{self.library}, {self._format(not self.symmetric)!r}"
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error
        is_held = self.symmetric or self.bits < 8
        how = self._decode, self._quantized, (kind, is_held), self.parts
        return Entry(self.where, self.shape, self.dtype, *how)

    @property
    def _middle(self) -> int:
        return 2 ** (self.bits - 1)

    def _format(self, affine: bool) -> Format:
        block = self.block if (self.block or 0) < self.shape[1] else None
        options: dict[str, Any] = {"block_size": block, "scale_dtype": "float32"}
        if self.bits < 8:
            options |= {"fit": "absmax", "affine": affine}
        return _formats[self.bits](**options)

    def _blocks_of_columns(self) -> np.ndarray:
        if self.order is not None:
            return self.order()
        return np.arange(self.shape[1]) // (self.block or self.shape[1])

    def _decode(self) -> np.ndarray:
        blocks = self._blocks_of_columns()
        levels = self.codes().astype(np.float32)
        levels -= self.zeros()[:, blocks]
        with np.errstate(over="ignore", invalid="ignore"):
            levels *= self.scales().astype(np.float32)[:, blocks]
            return levels.astype(self.dtype)

    def _quantized(self):
        zeros, scales = self.zeros(), self.scales().astype(np.float32)
        if self.order is not None:
            order = self._order_of_blocks(self.order())
            zeros, scales = zeros[:, order], scales[:, order]
        middle = self._middle
        if self.bits == 8 or (self.symmetric and np.all(zeros == middle)):
            if np.any(zeros != middle):
                raise NotHeld("has zero points beside codes of 8 bits.")
            levels = self.codes().astype(np.int16) - np.int16(middle)
            return from_levels(levels, scales, self._format(False), self.dtype)
        offsets = -zeros * scales.astype(np.float64)
        how = self._format(True), self.dtype
        return from_codes(self.codes(), scales, offsets, *how)

    def _order_of_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """Which scale each block has, if all columns of one have the same."""
        step = min(self.block or len(blocks), len(blocks))
        first = blocks[::step]
        if np.any(np.repeat(first, step)[: len(blocks)] != blocks):
            raise NotHeld(
                "has columns that are not in the order of their blocks, as they were "
                "quantized by the size of activations (desc_act)."
            )
        return first
