"""A kernel for a product: on which chip, in what it multiplies, and how it is cut."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ...formats import Format
from . import _mosaic, _triton
from ._pipeline import Pipeline
from ._triton import Tiles


@dataclasses.dataclass(frozen=True)
class TensorCoreKernel:
    """`operand` is what tensor cores multiply, and `parts` how many of these stand for
    a number of the activation, and of the weight."""

    chip: str
    operand: str
    parts: tuple[int, int]
    tiles: Tiles | Pipeline

    @property
    def by(self) -> str:
        return "Mosaic" if isinstance(self.tiles, Pipeline) else "Triton"

    @property
    def scales_weights(self) -> bool:
        """In 16 bits, if a row has several scales."""
        return isinstance(self.tiles, Tiles) and self.tiles.scaled

    @property
    def name(self) -> str:
        rows = "few rows" if self.tiles.m == 16 else f"{self.tiles.m} rows"
        twice = {(1, 1): "", (2, 1): " twice", (2, 2): " three times"}[self.parts]
        return f"{rows}, {self.operand}{twice}"

    def sample(self, format: Format) -> tuple["TensorCoreKernel", int, int, int]:
        """To try it: the kernel, rows of an activation, rows of a weight, and bytes of
        its codes, which are whole tiles and a rest of each axis."""
        if isinstance(self.tiles, Pipeline):
            # One cluster has two tiles, and more steps than are on their way.
            tiles = dataclasses.replace(self.tiles, cores=self.tiles.cluster)
            rows, packed = tiles.rows * tiles.cluster + 8, 512 * format.bits // 8
        else:
            # Sums of two parts stand for those of more.
            tiles = dataclasses.replace(self.tiles, split=min(self.tiles.split, 2))
            rows = tiles.rows * tiles.split + 8
            packed = tiles.bytes * tiles.subtiles * tiles.split
            packed += format.group * format.bits // 8 if format.bits < 8 else 16
        kernel = dataclasses.replace(self, tiles=tiles)
        return kernel, max(tiles.m - 3, 1), rows, packed

    def dot(
        self, *args, format: Format, contract_rows: bool, out_dtype, interpret: bool
    ) -> Any:
        """As those of `_mosaic.py` and `_triton.py`."""
        options: dict[str, Any] = dict(
            format=format,
            operand=jnp.dtype(self.operand),
            out_dtype=out_dtype,
            interpret=interpret,
        )
        if isinstance(self.tiles, Pipeline):
            assert not contract_rows
            return _mosaic.dot(*args, pipeline=self.tiles, **options)
        return _triton.dot(
            *args,
            contract_rows=contract_rows,
            parts=self.parts,
            tiles=self.tiles,
            **options,
        )
