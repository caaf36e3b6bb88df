"""Shapes, tiles and index maps of the Mosaic kernel."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...formats import Format
from ._lookup import Decoder
from ._pipeline import LINE, Pipeline, STEP, width_of


@dataclasses.dataclass(frozen=True)
class MosaicPlan:
    """The static choices for one product.

    - `decoder`: decodes codes to the dtype of the operands, `decoder.dtype`.
    - `m`, `size`: the shape of the activation.
    - `rows`, `blocks`: rows of the weight, and scales per row.
    - `columns`: columns of the operands in a pipeline step.
    """

    format: Format
    decoder: Decoder
    pipeline: Pipeline
    x_dtype: Any
    codes_dtype: Any
    scales_dtype: Any
    out_dtype: Any
    m: int
    size: int
    rows: int
    blocks: int
    columns: int
    interpret: bool

    @classmethod
    def make(
        cls,
        x,
        codes,
        scales,
        format: Format,
        operand,
        pipeline: Pipeline,
        out_dtype,
        interpret: bool,
    ) -> "MosaicPlan":
        if interpret:  # Interpret mode supports no larger clusters.
            pipeline = dataclasses.replace(pipeline, cluster=1)
        return cls(
            format,
            Decoder(format, operand, 1, interpret),
            pipeline,
            x_dtype=x.dtype,
            codes_dtype=codes.dtype,
            scales_dtype=scales.dtype,
            out_dtype=out_dtype,
            m=x.shape[0],
            size=x.shape[1],
            rows=codes.shape[0],
            blocks=scales.shape[1],
            columns=LINE // x.dtype.itemsize,
            interpret=interpret,
        )

    @property
    def blocked(self) -> bool:
        return self.blocks > 1

    @property
    def integers(self) -> bool:
        return self.decoder.dtype == jnp.int8

    @property
    def sum_dtype(self) -> Any:
        return jnp.int32 if self.integers else jnp.float32

    @property
    def num_m(self) -> int:
        """Tiles along the rows of the activation."""
        return pl.cdiv(self.m, self.pipeline.m)

    @property
    def num_rows(self) -> int:
        """Tiles along the rows of the weight, in clusters."""
        return pl.cdiv(self.rows, self.pipeline.rows * self.pipeline.cluster)

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
        return pl.cdiv(self.size, self.columns)

    @property
    def step_bytes(self) -> int:
        """Bytes of codes per row and step."""
        return self.columns * self.format.bits // 8

    @property
    def width(self) -> int:
        """Bytes of codes per row that a step copies."""
        return width_of(self.format, self.columns)

    @property
    def step_scales(self) -> int:
        """Scales per row and step, or 0 if scales multiply the result."""
        if not self.blocked:
            return 0
        return max(STEP // (self.format.block_size or STEP), 1)

    def first_scale(self, k):
        """Return the index of the first scale of step `k`."""
        if self.step_scales > 1:
            return k * self.step_scales
        return lax.div(k, jnp.int32((self.format.block_size or STEP) // STEP))

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
