"""Shapes, tiles and index maps of the Mosaic kernel."""

import dataclasses
import functools as ft
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .._product import Product
from ._lookup import Decoder
from ._pipeline import LINE, Pipeline, STEP, width_of


@dataclasses.dataclass(frozen=True)
class MosaicPlan:
    """The static choices for one product. `operand` is the dtype of both operands of
    the tensor cores. `stacked` is whether codes and scales are the rows of a stack."""

    product: Product
    pipeline: Pipeline
    operand: Any
    interpret: bool
    stacked: tuple[bool, bool] = (False, False)

    @ft.cached_property
    def decoder(self) -> Decoder:
        return Decoder(self.product.format, self.operand, 1, self.interpret)

    @property
    def blocked(self) -> bool:
        return self.product.blocks > 1

    @property
    def integers(self) -> bool:
        return self.operand == jnp.int8

    @property
    def sum_dtype(self) -> Any:
        return jnp.int32 if self.integers else jnp.float32

    @property
    def columns(self) -> int:
        """Columns of the operands in a pipeline step."""
        return LINE // self.product.x.dtype.itemsize

    @property
    def num_m(self) -> int:
        """Tiles along the rows of the activation."""
        return pl.cdiv(self.product.m, self.pipeline.m)

    @property
    def num_rows(self) -> int:
        """Tiles along the rows of the weight, in clusters."""
        return pl.cdiv(self.product.rows, self.pipeline.rows * self.pipeline.cluster)

    @property
    def num_tiles(self) -> int:
        """Tiles of the result, in clusters."""
        return self.num_m * self.num_rows

    @property
    def clusters(self) -> int:
        """Clusters in the grid. Each computes several tiles of the result."""
        return min(self.pipeline.cores // self.pipeline.cluster, self.num_tiles)

    @property
    def padded_m(self) -> int:
        return self.num_m * self.pipeline.m

    @property
    def padded_rows(self) -> int:
        return self.num_rows * self.pipeline.cluster * self.pipeline.rows

    @property
    def steps(self) -> int:
        """Pipeline steps per tile."""
        return pl.cdiv(self.product.size, self.columns)

    @property
    def step_bytes(self) -> int:
        """Bytes of codes per row and step."""
        return self.columns * self.product.format.bits // 8

    @property
    def width(self) -> int:
        """Bytes of codes per row that a step copies."""
        return width_of(self.product.format, self.columns)

    @property
    def block_size(self) -> int:
        return self.product.format.block_size or STEP

    @property
    def step_scales(self) -> int:
        """Scales per row and step, or 0 if scales multiply the result."""
        return max(STEP // self.block_size, 1) if self.blocked else 0

    def first_scale(self, k):
        """Return the index of the first scale of step `k`."""
        if self.step_scales > 1:
            return k * self.step_scales
        return lax.div(k, jnp.int32(self.block_size // STEP))

    def slot(self, step):
        """Return the slot of a step in the circular buffers."""
        return lax.rem(step, jnp.int32(self.pipeline.stages))

    def tile(self, i) -> tuple:
        """Return the position of tile `i` along the rows of both operands.

        Clusters that run at the same time compute up to eight rows of tiles, so that
        they share both operands in the L2 cache.
        """
        group_rows = min(8, self.num_m)
        group = lax.div(i, jnp.int32(group_rows * self.num_rows))
        i = lax.rem(i, jnp.int32(group_rows * self.num_rows))
        height = jnp.minimum(group_rows, self.num_m - group * group_rows)
        return group * group_rows + lax.rem(i, height), lax.div(i, height)
