"""Adapters beside frozen weights: LoRA, or QLoRA for quantized weights."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .._jax import typed, warn, wide_dtype
from ..arrays import is_implicit, LoraArray, MatrixAxes
from ..trees import (
    Axis,
    Choice,
    choose_among,
    replace_chosen,
    Rules,
    Site,
    Tree,
    WeightAxes,
)
from ._keys import split_key


@typed
def lora_tree(
    model: Tree,
    rank: int,
    *,
    key: PRNGKeyArray,
    alpha: float | int | None = None,
    dropout: float | int = 0.0,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
) -> Tree:
    """Add low-rank adapters to the weights of a model (LoRA, arXiv 2106.09685).

    The weights may be quantized (QLoRA, arXiv 2305.14314). Each chosen weight `w`
    becomes an [`eqquant.arrays.LoraArray`][], which represents `w + alpha / rank * b @
    a`. `a` is normally distributed, with variance `1 / contracted size`. `b` is zero,
    so the results of the model do not change. Model code does not change.

    [`eqquant.trainable_mask`][] then selects the adapters only.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp
        import optax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, eqquant.NF4(double_quantization=True))
        model = eqquant.lora_tree(model, 8, key=jax.random.key(1))
        trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
        optimiser = optax.adam(1e-3)
        state = optimiser.init(trainable)


        @eqx.filter_jit
        def step(trainable, frozen, state, x):
            def loss(trainable):
                return jnp.mean(jax.vmap(eqx.combine(trainable, frozen))(x) ** 2)

            gradients = eqx.filter_grad(loss)(trainable)
            updates, state = optimiser.update(gradients, state)
            return eqx.apply_updates(trainable, updates), state


        trainable, state = step(trainable, frozen, state, jnp.ones((8, 64)))
        model = eqx.combine(trainable, frozen)
        assert (model.layers[0].weight.b != 0).any()
        ```

    **Arguments:**

    - `model`: any pytree.
    - `rank`: the rank of the adapters.
    - `key`: a random key. The initial value of an adapter depends on the key and on the
        path of its weight, but not on the choice of other weights.
    - `alpha`: an adapter is multiplied by `alpha / rank`, by default 1.
    - `dropout`: the dropout rate of the activation at the input of an adapter. A key
        inside of the adapter determines the mask: see
        [`eqquant.training.with_dropout_key`][].
    - `where`, `min_size`: as in [`eqquant.quantize_tree`][]. Weights that a rule has
        quantized are also chosen by default. Embeddings are not, because their
        adapters would have a row for each word. A weight that is smaller than the rank
        is left out, with a warning.
    - `rules`: as in [`eqquant.quantize_tree`][], but with ranks instead of formats:
        `None` (no adapter), a rank, or a pair `(rank, axis)`.

    **Returns:**

    A pytree of the same type. Adapters are float32 (float64 for float64 weights).

    A weight has contracted axes (or the `axis` of a rule), an output axis, and before
    them the axes of stacked layers. Each layer of a stack has its own adapter. For an
    array that is not the weight of a known layer, all axes except the contracted ones
    are outputs. Both kinds are merged into one axis each, and the adapter belongs to
    the resulting matrix.

    **Raises:**

    - `ValueError` if `rank`, `alpha` or `dropout` is out of range, or if no weight is
        chosen. Also, with the path, if a weight is not a matrix after merging, is
        smaller than the rank, or already has an adapter.
    - `TypeError`, with the path, if an array is not floating point.
    """
    caller = "lora_tree"
    _check_rank(rank, f"{caller}: ")
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"{caller}: alpha must be positive, got {alpha}.")
    if not 0 <= dropout < 1:
        raise ValueError(
            f"{caller}: dropout must be at least 0 and below 1, got {dropout}."
        )
    if jnp.issubdtype(key.dtype, jnp.uint32):
        key = jax.random.wrap_key_data(key)

    def is_candidate(leaf):
        return is_implicit(leaf) or eqx.is_array(leaf) or isinstance(leaf, np.ndarray)

    left_out: list[str] = []

    def is_worth_it(site: Site, kind: WeightAxes, _) -> bool:
        leaf = site.leaf
        if leaf.size < min_size or kind.is_table:
            return False
        if isinstance(leaf, LoraArray):  # Raises an error below.
            return True
        if rank > min(_matrix_shape(leaf, _axes_of(leaf, kind.axis, kind.out))):
            left_out.append(site.path)
            return False
        return True

    choices = choose_among(
        is_candidate,
        model,
        rank,
        is_worth_it=is_worth_it,
        where=where,
        rules=Rules(rules, _parse_rule, caller),
        caller=caller,
    )
    smaller = f"smaller than the rank, {rank}: {left_out}"
    if not choices:
        reason = f"Weights are {smaller}. " if left_out else ""
        raise ValueError(
            f"{caller}: no weight is chosen, so there would be nothing to train. "
            f"{reason}See where, rules and min_size."
        )
    if left_out:
        warn(f"{caller}: no adapter for weights {smaller}.", UserWarning)

    def add_adapter(leaf, choice: Choice):
        scale = 1.0 if alpha is None else alpha / choice.what
        path_key = jax.random.fold_in(key, zlib.crc32(choice.path.encode()))
        return _with_adapter(leaf, choice, path_key, scale, float(dropout))

    return replace_chosen(add_adapter, model, choices, caller=caller)


def _check_rank(rank: Any, prefix: str = "") -> None:
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"{prefix}a rank must be an integer, got {rank!r}.")
    if rank < 1:
        raise ValueError(f"{prefix}a rank must be at least 1, got {rank}.")


def _parse_rule(rule: Any) -> tuple[int | None, Any, None]:
    rank, axis = rule if isinstance(rule, tuple) else (rule, None)
    if rank is not None:
        _check_rank(rank)
    return rank, axis, None


def _with_adapter(leaf, choice: Choice, key, scale: float, dropout: float) -> LoraArray:
    if isinstance(leaf, LoraArray):
        raise ValueError(
            "it has an adapter already. Merge the adapter with `eqquant.merge_lora`, "
            "or leave this weight out by a rule."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(f"an adapter needs a floating-point weight, not {leaf.dtype}.")
    base = leaf if is_implicit(leaf) else jnp.asarray(leaf)
    axes = _axes_of(base, choice.axis, choice.out)
    outputs, inputs = _matrix_shape(base, axes)
    rank = choice.what
    if rank > min(outputs, inputs):
        raise ValueError(
            f"rank {rank} is larger than a dimension of the weight, which is the "
            f"matrix ({outputs}, {inputs}) after merging axes. Pass a smaller rank or "
            "None in a rule."
        )
    dtype = wide_dtype(base.dtype)
    stack, in_shape, out_shape = (
        [base.shape[axis] for axis in group]
        for group in (axes.stack, axes.inputs, axes.outputs)
    )
    a = jax.random.normal(key, (*stack, rank, *in_shape), dtype) / math.sqrt(inputs)
    b = jnp.zeros((*stack, *out_shape, rank), dtype)
    return LoraArray(
        base=base,
        a=a,
        b=b,
        key=split_key(jax.random.fold_in(key, 0), stack) if dropout else None,
        scale=scale,
        dropout=dropout,
        in_axes=axes.inputs,
        out_axes=axes.outputs,
    )


def _axes_of(weight, axis: Axis, out: int | None) -> MatrixAxes:
    axes = MatrixAxes.of(weight.ndim, axis, out)
    if not axes.outputs:
        raise ValueError(
            f"an adapter needs a weight with input axes and output axes, but the axes "
            f"{axis} of the shape {weight.shape} are all inputs."
        )
    return axes


def _matrix_shape(weight, axes: MatrixAxes) -> tuple[int, int]:
    """Return the numbers of outputs and inputs."""
    outputs, inputs = (
        math.prod(weight.shape[axis] for axis in group)
        for group in (axes.outputs, axes.inputs)
    )
    return outputs, inputs
