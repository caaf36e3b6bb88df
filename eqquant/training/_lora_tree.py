"""Adapters beside frozen weights: LoRA, or QLoRA for quantized weights."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .._jax import typed, warn
from ..arrays import is_implicit, LoraArray
from ..trees import Choice, choose_among, replace_chosen, Rules, Site, Tree, Weight
from ._dropout import split_key


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
    - `where`, `min_size`: as in [`eqquant.quantize_tree`][]. The default are the same
        weights except embeddings, whose adapters would have a row for each word, and
        weights that a rule has quantized. A weight that is smaller than the rank is
        left out, with a warning.
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
    _check_rank(rank, caller)
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

    def is_worth_it(site: Site, kind: Weight, _) -> bool:
        leaf = site.leaf
        if leaf.size < min_size or kind.is_table:
            return False
        if isinstance(leaf, LoraArray):  # Raises an error below.
            return True
        if rank > min(_fold(leaf, kind.axis, kind.out).sizes):
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

    def one(leaf, choice: Choice):
        scale = 1.0 if alpha is None else alpha / choice.what
        of_path = jax.random.fold_in(key, zlib.crc32(choice.path.encode()))
        return _with_adapter(leaf, choice, of_path, scale, float(dropout))

    return replace_chosen(one, model, choices, caller=caller)


def _check_rank(rank: Any, caller: str) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"{caller}: a rank must be an integer, got {rank!r}.")
    if rank < 1:
        raise ValueError(f"{caller}: a rank must be at least 1, got {rank}.")


def _parse_rule(rule: Any) -> tuple[int | None, Any, None]:
    rank, axis = rule if isinstance(rule, tuple) else (rule, None)
    if rank is not None:
        _check_rank(rank, "lora_tree: rules")
    return rank, axis, None


def _with_adapter(leaf, choice: Choice, key, scale: float, dropout: float) -> LoraArray:
    if isinstance(leaf, LoraArray):
        raise ValueError(
            "it has an adapter already. Merge that with `eqquant.merge_lora` first, or "
            "leave this weight out by a rule."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(f"an adapter needs a floating-point weight, not {leaf.dtype}.")
    base = leaf if is_implicit(leaf) else jnp.asarray(leaf)
    fold = _fold(base, choice.axis, choice.out)
    lead, in_shape, out_shape = fold.shapes
    in_size, out_size = fold.sizes
    rank = choice.what
    if rank > min(in_size, out_size):
        raise ValueError(
            f"rank {rank} is larger than a dimension of the weight, which is "
            f"({out_size}, {in_size}) after folding. Give it a smaller one, or none, "
            "by a rule."
        )
    dtype = jnp.promote_types(base.dtype, jnp.float32)
    a = jax.random.normal(key, (*lead, rank, *in_shape), dtype) / math.sqrt(in_size)
    b = jnp.zeros((*lead, *out_shape, rank), dtype)
    return LoraArray(
        base=base,
        a=a,
        b=b,
        key=split_key(jax.random.fold_in(key, 0), lead) if dropout else None,
        scale=scale,
        dropout=dropout,
        in_axes=fold.ins,
        out_axes=fold.outs,
    )


class _Fold(NamedTuple):
    """A weight as a matrix: its input axes and output axes, counted from the end, and
    the sizes of leading, input and output axes."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    shapes: tuple[list[int], list[int], list[int]]

    @property
    def sizes(self) -> tuple[int, int]:
        _, ins, outs = self.shapes
        return math.prod(ins), math.prod(outs)


def _fold(weight, axis: int | tuple[int, ...], out: int | None) -> _Fold:
    ndim, axes = weight.ndim, (axis,) if isinstance(axis, int) else tuple(axis)
    if not all(-ndim <= i < ndim for i in axes):
        raise ValueError(f"axis {axis} is not one of an array of {ndim} axes.")
    ins = tuple(sorted(i % ndim - ndim for i in axes))
    others = tuple(i for i in range(-ndim, 0) if i not in ins)
    outs = others if out is None else (out,)
    if not outs or not ins:
        raise ValueError(
            f"an adapter needs a weight with axes to contract and others to put out, "
            f"but of shape {weight.shape} it contracts {axis}."
        )
    lead = tuple(i for i in others if i not in outs)
    lead, in_shape, out_shape = (
        [weight.shape[i] for i in axes] for axes in (lead, ins, outs)
    )
    return _Fold(ins, outs, (lead, in_shape, out_shape))
