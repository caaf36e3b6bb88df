"""Calls of Pallas kernels that read some operands at an index of a stack."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32


def call(
    kernel: Callable,
    index: Int32[Array, " batch"] | None,
    stacked: Sequence[bool],
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: pl.BlockSpec,
    scratch_shapes: Sequence[Any],
    **options: Any,
) -> Callable:
    """Return `pl.pallas_call`. The first axis of the grid and of every operand counts
    products.

    With an index, product `b` reads the operands in `stacked` at `index[b]`. The index
    is prefetched, so that copies of tiles start as early as without it.
    """
    if index is None:
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
            **options,
        )

    def with_index(spec: pl.BlockSpec, is_stacked: bool) -> pl.BlockSpec:
        place: Any = spec.index_map

        def index_map(*args):
            *step, positions = args
            first, *rest = place(*step)
            return positions[first] if is_stacked else first, *rest

        return pl.BlockSpec(spec.block_shape, index_map)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=grid,
        in_specs=list(map(with_index, in_specs, stacked)),
        out_specs=with_index(out_specs, False),
        scratch_shapes=scratch_shapes,
    )
    run = pl.pallas_call(
        lambda positions, *refs: kernel(*refs), grid_spec=grid_spec, **options
    )

    def in_hbm(x: Array, is_stacked: bool) -> Array:
        # XLA moves operands that fit to VMEM. Each layer would move the whole stack.
        if not is_stacked or options.get("interpret"):
            return x
        return pltpu.with_memory_space_constraint(x, pltpu.HBM)

    return lambda *operands: run(index, *map(in_hbm, operands, stacked))
