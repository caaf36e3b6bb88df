"""Tensors that are in several pieces, in the files of the processes that had them."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ._layout import Piece
from ._safetensors import Slices, Tensor, TensorFile


@dataclasses.dataclass(frozen=True)
class Placed:
    """A piece: where it is read from, where it starts, and how large it is."""

    file: TensorFile
    name: str
    checksum: int | None
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
    """A tensor whose pieces cover it, each element once."""

    pieces: tuple[Placed, ...]

    def read_slices(self, slices: Sequence[tuple[Slices, np.ndarray]]) -> None:
        """Each piece that is needed is read once."""
        for placed in self.pieces:
            shared = [_shared(placed.slices, place, out) for place, out in slices]
            if found := [s for s in shared if s is not None]:
                placed.file.read_slices(placed.name, found, placed.checksum)


def _shared(
    piece: Slices, place: Slices, out: np.ndarray
) -> tuple[Slices, np.ndarray] | None:
    """What a piece has of a slice: where in the piece, and where it goes."""
    there, here = [], []
    for p, s in zip(piece, place, strict=True):
        start, stop = max(p.start, s.start), min(p.stop, s.stop)
        if start >= stop:
            return None
        there.append(slice(start - p.start, stop - p.start))
        here.append(slice(start - s.start, stop - s.start))
    return tuple(there), out[(*here,)]


def assemble(name: str, pieces: Sequence[Placed]) -> SplitTensor:
    """The tensor of these pieces; a `ValueError` if they do not make one: they must be
    all parts of a grid, as those of a mesh are."""
    first = pieces[0]
    shape, dtype = first.piece.shape, first.file.tensors[first.name].dtype
    for placed in pieces:
        here = placed.piece.shape, placed.file.tensors[placed.name].dtype
        if here != (shape, dtype):
            raise ValueError(
                f"{placed.file.path}: {placed.name!r} is a piece of "
                f"{here[1]}{list(here[0])}, and others of {name!r} are pieces of "
                f"{dtype}{list(shape)}."
            )
    by_start = {placed.piece.start: placed.slices for placed in pieces}
    axes = [sorted(set(starts)) for starts in zip(*by_start, strict=True)]
    ends = [
        dict(zip(starts, (*starts[1:], size), strict=True))
        for starts, size in zip(axes, shape, strict=True)
    ]
    # That many, and all different: so they are those of the grid.
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
            f"{first.file.path}: the pieces of {name!r} do not cover its shape "
            f"{shape}, each element once."
        )
    return SplitTensor(name, dtype, shape, tuple(pieces))
