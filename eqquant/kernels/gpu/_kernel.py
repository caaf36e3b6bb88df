"""A tensor core kernel for a product: its chip, its operands and its tiles."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import num_bytes
from .._compute import Compute
from .._product import Operand, Product
from . import _mosaic, _triton
from ._pipeline import Pipeline, STEP
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

    def sample(self, product: Product) -> tuple["TensorCoreKernel", Product]:
        """Return a kernel and a small product for the check of the kernel. Each axis
        has whole tiles and a partial one."""
        format = product.format
        if isinstance(self.tiles, Pipeline):
            # One cluster computes two tiles, with more steps than stages.
            tiles = dataclasses.replace(self.tiles, cores=self.tiles.cluster)
            rows, columns = tiles.rows * tiles.cluster + STEP, 512
            out_dtype = "bfloat16" if self.operand == "int8" else self.operand
        else:
            # A split in two covers larger splits.
            tiles = dataclasses.replace(self.tiles, split=min(self.tiles.split, 2))
            rows = tiles.rows * tiles.split + 8
            columns = tiles.step_bytes * tiles.split * _triton.planes_in(format)
            columns += format.group if format.bits < 8 else 16
            out_dtype = "float32"
        blocks, multiple = 1, format.group
        if format.block_size and product.blocks > 1:
            blocks, multiple = -(-columns // format.block_size), format.block_size
        columns = -(-columns // multiple) * multiple
        packed = num_bytes(columns, format.bits)
        x = max(tiles.m - 3, 1), rows if product.contract_rows else columns
        sample = dataclasses.replace(
            product,
            x=Operand((1, *x), product.x.dtype),
            codes=Operand((1, rows, packed), product.codes.dtype),
            scales=Operand((1, rows, blocks), product.scales.dtype),
            compute=Compute("highest"),
            weight_dtype=np.dtype("float32"),
            out_dtype=jnp.dtype(out_dtype),
        )
        return dataclasses.replace(self, tiles=tiles), sample

    def dot(
        self, product: Product, *arrays: Any, interpret: bool, **stacks: Any
    ) -> Any:
        """Run [`_mosaic.dot`][] or [`_triton.dot`][]."""
        if isinstance(self.tiles, Pipeline):
            return _mosaic.dot(
                product,
                *arrays,
                operand=self.operand,
                pipeline=self.tiles,
                interpret=interpret,
                **stacks,
            )
        return _triton.dot(
            product,
            *arrays,
            operand=self.operand,
            parts=self.parts,
            tiles=self.tiles,
            interpret=interpret,
            **stacks,
        )
