"""A tensor core kernel for a product: its chip, its operands and its tiles."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ...formats import Format
from . import _mosaic, _triton
from ._pipeline import Pipeline
from ._triton import Tiles


@dataclasses.dataclass(frozen=True)
class TensorCoreKernel:
    """A Triton or Mosaic kernel. `operand` is the dtype that tensor cores multiply. The
    activation and the weight are sums of `parts` operands."""

    chip: str
    operand: str
    parts: tuple[int, int]
    tiles: Tiles | Pipeline

    @property
    def by(self) -> str:
        return "Mosaic" if isinstance(self.tiles, Pipeline) else "Triton"

    @property
    def scales_weights(self) -> bool:
        """Whether scales of blocks multiply the weight, in 16 bits."""
        return isinstance(self.tiles, Tiles) and self.tiles.scaled

    @property
    def name(self) -> str:
        rows = "few rows" if self.tiles.m == 16 else f"{self.tiles.m} rows"
        products = {(1, 1): "", (2, 1): " twice", (2, 2): " three times"}[self.parts]
        return f"{rows}, {self.operand}{products}"

    def sample(self, format: Format) -> tuple["TensorCoreKernel", int, int, int]:
        """Return a kernel for the check, and the rows of the activation, the rows of
        the weight and the bytes of its codes. Each axis has whole tiles and a
        partial one.
        """
        if isinstance(self.tiles, Pipeline):
            # One cluster computes two tiles, with more steps than stages.
            tiles = dataclasses.replace(self.tiles, cores=self.tiles.cluster)
            rows, packed = tiles.rows * tiles.cluster + 8, 512 * format.bits // 8
        else:
            # A split in two covers larger splits.
            tiles = dataclasses.replace(self.tiles, split=min(self.tiles.split, 2))
            rows = tiles.rows * tiles.split + 8
            packed = tiles.bytes * tiles.subtiles * tiles.split
            packed += format.group * format.bits // 8 if format.bits < 8 else 16
        kernel = dataclasses.replace(self, tiles=tiles)
        return kernel, max(tiles.m - 3, 1), rows, packed

    def dot(
        self, *args, format: Format, contract_rows: bool, out_dtype, interpret: bool
    ) -> Any:
        """Run [`_mosaic.dot`][] or [`_triton.dot`][]."""
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
