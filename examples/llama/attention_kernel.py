"""Attention of one token in a kernel for TPUs.

Scores stay on the chip. On chips with two cores, XLA writes them to HBM and reads them
twice.
"""

import functools as ft

import jax
import jax.numpy as jnp
from attention import softcap
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int


# Tokens that one step of the kernel reads at most, and a score that has no weight.
_tokens, _masked = 2048, -1e30


def _kernel(where, q, keys, values, mask, out, top, sums, total, *, cap: float | None):
    """Add the tokens of a block to the running sums of one head.

    The sums are relative to `exp(top)`, the largest score so far (online softmax).
    """
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _():
        top[...] = jnp.full_like(top, _masked)
        sums[...] = jnp.zeros_like(sums)
        total[...] = jnp.zeros_like(total)

    @pl.when(block <= where[1])
    def _():
        product = ft.partial(jnp.dot, preferred_element_type=jnp.float32)
        scores = softcap(product(q[0], keys[0, 0]), cap)
        scores = jnp.where(mask[0] != 0, scores, _masked)
        new = jnp.maximum(top[...], jnp.max(scores, -1, keepdims=True))
        weights = jnp.exp(scores - new[:, :1])
        fade = jnp.exp(top[...] - new)
        sums[...] = sums[...] * fade + jnp.sum(weights, -1, keepdims=True)
        added = product(weights.astype(values.dtype), values[0, 0])
        total[...] = total[...] * fade[:, :1] + added
        top[...] = new

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        out[0] = (total[...] / sums[:, :1]).astype(out.dtype)


def attend_by_kernel(
    q: Float[Array, "batch heads 1 size"],
    keys: Float[Array, "layers all_heads size keys"],
    values: Float[Array, "layers all_heads keys size"],
    layer: Int[Array, ""],
    mask: Bool[Array, "batch 1 keys"],  # A batch of 1 broadcasts.
    cap: float | None,
    start: Int[Array, ""],
    interpret: bool = False,
) -> Float[Array, "batch heads 1 size"]:
    """Compute attention for one token per sequence, at position `start`.

    The kernel reads the keys and values of earlier tokens from the stack. The capacity
    of the cache must be at most 2,048 or a multiple of it.
    """
    _, count, size, capacity = keys.shape
    tokens = min(capacity, _tokens)
    if capacity % tokens:
        raise ValueError(
            f"attend_by_kernel: the cache has a capacity of {capacity} tokens, but the "
            f"kernel reads {tokens} tokens at once. Pass a multiple of {tokens}."
        )
    rows = q.reshape(count, -1, size)
    group = rows.shape[1]
    heads = count // len(mask)  # Heads of one mask.
    where = jnp.stack([jnp.asarray(i, jnp.int32) for i in (layer, start // tokens)])
    # Blocks after the last token are not read.
    place = lambda block, where: lax.min(block, where[1])
    of_head = pl.BlockSpec((1, group, size), lambda head, block, where: (head, 0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(count, capacity // tokens),
        in_specs=[
            of_head,
            pl.BlockSpec(
                (1, 1, size, tokens),
                lambda head, block, where: (where[0], head, 0, place(block, where)),
            ),
            pl.BlockSpec(
                (1, 1, tokens, size),
                lambda head, block, where: (where[0], head, place(block, where), 0),
            ),
            pl.BlockSpec(
                (1, 1, tokens),
                lambda head, block, where: (head // heads, 0, place(block, where)),
            ),
        ],
        out_specs=of_head,
        scratch_shapes=[
            pltpu.VMEM((group, columns), jnp.float32) for columns in (128, 128, size)
        ],
    )
    y = pl.pallas_call(
        ft.partial(_kernel, cap=cap),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        # Heads are split over the cores of a chip.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
        interpret=interpret,
        name="attend_to_cache",
    )(where, rows.astype(keys.dtype), keys, values, mask.astype(jnp.int32))
    return y.reshape(q.shape)
