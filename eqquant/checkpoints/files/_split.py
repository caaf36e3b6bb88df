"""Tensors that several processes wrote in pieces."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ._manifest import Piece
from ._safetensors import overlap, Slices, Tensor, TensorFile


@dataclasses.dataclass(frozen=True)
class Placed:
    """A piece of a tensor in a file, with its position in the whole tensor."""

    file: TensorFile
    name: str
    piece: Piece

    @property
    def slices(self) -> Slices:
        shape = self.file.tensors[self.name].shape
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.piece.start, shape, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class SplitTensor(Tensor):
    """A tensor whose pieces cover each element exactly once."""

    pieces: tuple[Placed, ...]

    def read_slices(self, slices: Sequence[tuple[Slices, np.ndarray]]) -> None:
        """Read slices of the whole tensor. Each piece is read at most once."""
        for placed in self.pieces:
            overlaps = [overlap(placed.slices, place, out) for place, out in slices]
            if found := [s for s in overlaps if s is not None]:
                placed.file.read_slices(placed.name, found)


def assemble(name: str, pieces: Sequence[Placed]) -> SplitTensor:
    """Join pieces to a tensor. Raise a `ValueError` unless they form a grid without
    gaps, as the shards of a mesh do."""
    first = pieces[0]
    shape, dtype = first.piece.shape, first.file.tensors[first.name].dtype
    for placed in pieces:
        actual = placed.piece.shape, placed.file.tensors[placed.name].dtype
        if actual != (shape, dtype):
            raise ValueError(
                f"{placed.file.path}: {placed.name!r} is a piece of "
                f"{actual[1]}{list(actual[0])}, but other pieces of {name!r} have "
                f"{dtype}{list(shape)}."
            )
    by_start = {placed.piece.start: placed.slices for placed in pieces}
    axes = [sorted(set(starts)) for starts in zip(*by_start, strict=True)]
    ends = [
        dict(zip(starts, (*starts[1:], size), strict=True))
        for starts, size in zip(axes, shape, strict=True)
    ]
    # The number of pieces equals the number of grid cells, and all starts differ. So
    # the pieces are the cells.
    is_grid = (
        len(pieces) == len(by_start) == math.prod(map(len, axes))
        and all(starts[0] == 0 for starts in axes)
        and all(
            s.stop == end[s.start]
            for s, end in itertools.chain.from_iterable(
                zip(slices, ends, strict=True) for slices in by_start.values()
            )
        )
    )
    if not is_grid:
        raise ValueError(
            f"{first.file.path}: the pieces of {name!r} do not cover the shape {shape} "
            "exactly once."
        )
    return SplitTensor(name, dtype, shape, tuple(pieces))
