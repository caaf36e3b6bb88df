"""Adapters beside frozen weights: LoRA, and QLoRA where these are quantized."""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, overload, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .._implicit import is_implicit
from .._lora import LoraArray
from .._quantize import quantize
from .._report import Report, row_of
from .._selection import (
    Choice,
    choose_among,
    replace_chosen,
    Rules,
    Site,
    sites,
    Weight,
)
from .._typing import typed
from ..formats import as_format, Format


Tree = TypeVar("Tree")


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
    """Put a low-rank adapter beside the weights of a model, quantized or not (LoRA,
    arXiv 2106.09685; QLoRA, arXiv 2305.14314).

    Each weight `w` that is chosen becomes a [`eqquant.LoraArray`][], which stands for
    `w + alpha / rank * b @ a`. `a` is normal with a variance of one over the size of
    what the layer contracts; `b` is zero, so that the model computes what it did,
    exactly. Model code does not change.

    [`eqquant.trainable_mask`][] is then true of the adapters, and of nothing else.

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
    - `rank`: of the adapters.
    - `key`: a random key. What an adapter starts as depends on it and on the path of
        the weight, but not on what else is chosen.
    - `alpha`: an adapter is multiplied by `alpha / rank`; by default that is 1.
    - `dropout`: which part of the activation to drop where it enters an adapter. The
        mask comes from a key inside of the adapter: see
        [`eqquant.with_dropout_key`][].
    - `where`, `min_size`: as in [`eqquant.quantize_tree`][]. By default the weights of
        the same layers are chosen, but for those of embeddings, whose adapters would
        have a row for each word.
    - `rules`: as in [`eqquant.quantize_tree`][], but with a rank for a format: `None`
        (no adapter), a rank, or a pair `(rank, axis)`.

    **Returns:**

    A pytree of the same type. Adapters are float32 (float64 for float64 weights).

    The axes of a weight are the one (or several) that its layer contracts, or the
    `axis` of a rule, the one that it puts out, and those before, of stacked layers, of
    which each has an adapter of its own. Of an array that is not the weight of a known
    layer all but the contracted axes are put out: its adapter is that of the matrix
    into which both kinds of axes are folded.

    **Raises:**

    - `ValueError` if `rank`, `alpha` or `dropout` is out of range; if nothing is
        chosen; or (naming the path) if a weight is no matrix after folding, smaller
        than the rank, or has an adapter already.
    - `TypeError` (naming the path) if an array is not floating point.
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

    def is_worth_it(leaf, kind: Weight, _) -> bool:
        return leaf.size >= min_size and not kind.is_table

    choices = choose_among(
        is_candidate,
        model,
        rank,
        is_worth_it=is_worth_it,
        where=where,
        rules=Rules(rules, _parse_rule, caller),
        caller=caller,
    )
    if not choices:
        raise ValueError(
            f"{caller}: no weight is chosen, so there would be nothing to train. See "
            "where, rules and min_size."
        )

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


def _parse_rule(rule: Any) -> tuple[int | None, Any]:
    rank, axis = rule if isinstance(rule, tuple) else (rule, None)
    if rank is not None:
        _check_rank(rank, "lora_tree: rules")
    return rank, axis


def _with_adapter(leaf, choice: Choice, key, scale: float, dropout: float) -> LoraArray:
    if isinstance(leaf, LoraArray):
        raise ValueError(
            "it has an adapter already. Merge that with `eqquant.merge_lora` first, or "
            "leave this weight out by a rule."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(f"an adapter needs a floating-point weight, not {leaf.dtype}.")
    base = leaf if is_implicit(leaf) else jnp.asarray(leaf)
    ndim, axis = base.ndim, choice.axis
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if not all(-ndim <= i < ndim for i in axes):
        raise ValueError(f"axis {axis} is not one of an array of {ndim} axes.")
    ins = sorted(i % ndim - ndim for i in axes)
    if choice.out is None:
        outs = [i for i in range(-ndim, 0) if i not in ins]
    else:
        outs = [choice.out]
    if not outs or not ins:
        raise ValueError(
            f"an adapter needs a weight with axes to contract and others to put out, "
            f"but of shape {base.shape} it contracts {axis}."
        )
    lead = [base.shape[i] for i in range(-ndim, 0) if i not in (*ins, *outs)]
    in_shape, out_shape = ([base.shape[i] for i in axes] for axes in (ins, outs))
    in_size, out_size = math.prod(in_shape), math.prod(out_shape)
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
        key=_split(jax.random.fold_in(key, 0), lead) if dropout else None,
        scale=scale,
        dropout=dropout,
        in_axes=tuple(ins),
        out_axes=tuple(outs),
    )


def _split(key, shape):
    return jax.random.split(key, tuple(shape)) if shape else key


@typed
def with_dropout_key(model: Tree, key: PRNGKeyArray | None) -> Tree:
    """The model with another key for the dropout of its adapters.

    Call it in the loss, with a fresh key for each step; with `None`, no dropout, for
    inference. [`eqquant.lora_tree`][] leaves dropout on, as layers of `eqx.nn` do.

    Each adapter, and each layer of a stack, gets a key of its own. The mask is as large
    as the activation that a product sees: rows of a batch that is multiplied at once
    have masks of their own, but calls that are mapped over, or one after the other,
    share one: the features that are dropped are the same for all. To have others for
    each example, call this inside of the function that is mapped, with a key for each,
    as below; the tokens of an example, mapped over by its layers, share theirs.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        model = eqquant.lora_tree(model, 8, key=jax.random.key(1), dropout=0.1)


        @eqx.filter_grad
        def gradient(model, x, keys):
            def one(x, key):
                return eqquant.with_dropout_key(model, key)(x)

            return jnp.sum(jax.vmap(one)(x, keys))


        keys = jax.random.split(jax.random.key(2), 4)  # others for each step
        gradient(model, jnp.ones((4, 64)), keys)
        inference = eqquant.with_dropout_key(model, None)
        ```

    **Arguments:**

    - `model`: a pytree with adapters that have dropout.
    - `key`: a random key, or `None`.

    **Returns:**

    The same pytree with other keys.

    **Raises:**

    `ValueError` if a key is given, and no adapter has dropout.
    """
    if key is not None and jnp.issubdtype(key.dtype, jnp.uint32):
        key = jax.random.wrap_key_data(key)
    count = 0

    def renew(x):
        nonlocal count
        if not isinstance(x, LoraArray) or not x.dropout:
            return x
        count += 1
        if key is None:
            return x.replace(key=None)
        lead = x.a.shape[: x.a.ndim - 1 - len(x.in_axes)]
        return x.replace(key=_split(jax.random.fold_in(key, count), lead))

    out = jax.tree.map(renew, model, is_leaf=_is_lora)
    if not count and key is not None:
        raise ValueError(
            "with_dropout_key: no adapter in model has dropout: pass dropout to "
            "lora_tree."
        )
    return out


def _is_lora(x: Any) -> bool:
    return isinstance(x, LoraArray)


@overload
def merge_lora(model: Tree, format: None = None) -> Tree: ...


@overload
def merge_lora(model: Tree, format: Format | str) -> tuple[Tree, Report]: ...


@typed
def merge_lora(model: Any, format: Format | str | None = None) -> Any:
    """Add each adapter to its weight.

    There is no way back from a merged model: to train on, or to unmerge, keep the one
    with adapters. Nothing of it is changed.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, "nf4")
        model = eqquant.lora_tree(model, 8, key=jax.random.key(1))
        merged = eqquant.merge_lora(model)
        assert merged.layers[0].weight.dtype == jax.numpy.float32
        requantized, report = eqquant.merge_lora(model, "nf4")
        print(report)  # what requantizing costs
        assert requantized.layers[0].weight.format == eqquant.NF4()
        ```

    **Arguments:**

    - `model`: a pytree with adapters.
    - `format`: `None` to merge into floating point, of the dtype of the weight. A
        format, or the name of one, to quantize the sums again, along the axes that the
        adapters contract.

    **Returns:**

    A pytree of the same type, in which every [`eqquant.LoraArray`][] is a plain array.
    With a format every one is a [`eqquant.QuantizedArray`][], and beside the pytree
    comes a [`eqquant.Report`][] of them: the error that quantizing again adds, relative
    to the sum in floating point.

    **Raises:**

    `ValueError` if there is no adapter: if it was merged already.
    """
    choices = [
        Choice(i, site.path, None, site.leaf.in_axes, site.leaf.in_axes, None)
        for i, site in enumerate(sites(model))
        if isinstance(site.leaf, LoraArray)
    ]
    if not choices:
        raise ValueError(
            "merge_lora: model has no adapters: they are merged already, or "
            "eqquant.lora_tree never added any."
        )
    if format is None:
        merge: Callable = lambda leaf, _: leaf.dequantize()
        return replace_chosen(merge, model, choices, caller="merge_lora")

    format = as_format(format)
    rows = []

    def requantize(leaf: LoraArray, choice: Choice):
        merged = leaf.dequantize()
        quantized = quantize(merged, format, axis=choice.axis)
        rows.append(row_of(Site(choice.path, quantized, None, "", False), merged))
        return quantized

    out = replace_chosen(requantize, model, choices, caller="merge_lora")
    return out, Report(tuple(rows))
