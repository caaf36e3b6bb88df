"""Low-bit integer weights with zero points: `value = (code - zero) * scale`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ...formats import Format, Int2, Int3, Int4, Int8
from ._entry import Entry, from_codes, from_levels, NotExact
from ._parts import Parts


_formats: dict[int, type[Format]] = {2: Int2, 3: Int3, 4: Int4, 8: Int8}
BITS = tuple(_formats)
SCALE_DTYPES = ("float16", "bfloat16", "float32")


def block_order(parts: Parts, name: str, blocks: int) -> np.ndarray:
    """Read and check the block of each column."""
    order = parts.read(name)
    if np.any((order < 0) | (order >= blocks)):
        raise ValueError(
            f"{parts.where}: groups in {name!r} must be from 0 to {blocks - 1}, got "
            f"{order.min()} to {order.max()}."
        )
    return order


@dataclasses.dataclass(frozen=True)
class ZeroPointWeight:
    """A matrix with one row per output.

    **Fields:**

    - `library`: the library that packed the weight.
    - `where`, `shape`, `dtype`, `parts`: as in [`Entry`][].
    - `bits`: the number of bits per code.
    - `block`: the number of columns that share a scale; `None` for the whole row.
    - `symmetric`: whether every zero point should be the middle code.
    - `codes`: reads `(rows, columns)`, uint8.
    - `scales`: reads `(rows, blocks)`.
    - `zeros`: reads `(rows, blocks)`, integers.
    - `order`: reads the block of each column; `None` if blocks are consecutive.
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
        is_exact = self.symmetric or self.bits < 8
        readers = self._decode, self._quantized
        return Entry(
            self.where, self.shape, self.dtype, *readers, (kind, is_exact), self.parts
        )

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
                raise NotExact("has 8-bit codes with zero points, which Int8 lacks.")
            levels = self.codes().astype(np.int16) - np.int16(middle)
            return from_levels(levels, scales, self._format(False), self.dtype)
        offsets = -zeros * scales.astype(np.float64)
        return from_codes(self.codes(), scales, offsets, self._format(True), self.dtype)

    def _order_of_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """Return the scale index of each block of consecutive columns, which must all
        use the same scale."""
        step = min(self.block or len(blocks), len(blocks))
        first = blocks[::step]
        if np.any(np.repeat(first, step)[: len(blocks)] != blocks):
            raise NotExact(
                "has columns that are not consecutive within their groups, because "
                "they were quantized in the order of activations (desc_act)."
            )
        return first
