"""Quantized models: whole pytrees."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._array import QuantizedArray
from ._callables import is_quantized as _is_quantized
from ._quantize import quantize
from ._selection import classify, filter_mask, Rules, sites, Weight
from ._typing import typed
from ._warn import warn
from .formats import as_format, Format


Tree = TypeVar("Tree")

# A progress bar is for what takes seconds.
_long_work = 2**27


@typed
def quantize_tree(
    model: Tree,
    format: Format | str | None = "nf4",
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
    check_finite: bool = True,
    progress: bool | None = None,
) -> Tree:
    """Quantize the weights of a model, or of any pytree.

    By default these are: the weights of `eqx.nn.Linear`, `Embedding`, `Conv`,
    `ConvTranspose`, `GRUCell` and `LSTMCell` (and of whatever is made of them, stacked
    layers included); and of nested dictionaries what Flax and Haiku call `kernel`, `w`,
    `embedding` and `embeddings`. Everything else stays as it is: biases, norms, PReLU,
    the insides of SpectralNorm and WeightNorm, the placeholders of `Shared`. A weight
    stays as well if it is smaller than `min_size`, or would not get any smaller.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        quantized = eqquant.quantize_tree(
            model, "nf4", rules={"layers.0.*": "int8", "layers.2.*": None}
        )
        assert type(quantized) is eqx.nn.MLP
        assert quantized.layers[0].weight.format == eqquant.Int8()
        logits = jax.vmap(quantized)(jax.numpy.ones((8, 64)))
        ```

    **Arguments:**

    - `model`: any pytree.
    - `format`: a format, or the name of one; `None` to quantize only what rules say.
    - `where`: what to quantize instead of the default, as `eqx.filter` takes it: a
        function `leaf -> bool`, or a pytree prefix of bools.
    - `rules`: ordered `{pattern: what}`, which go first; the first pattern that matches
        the path of a leaf wins. A path is like `layers.0.weight`. A pattern is a string
        in which `*` and `?` match anything, or a compiled regular expression. `what` is
        a format, its name, `None` (leave it), or an [`eqquant.Rule`][] or a pair
        `(format, axis)`, which give the axis too. A pattern with wildcards leaves alone
        arrays of one axis and what is known not to be a weight; the exact path of a
        leaf does not. Rules that match nothing give a warning.
    - `min_size`: the least number of elements of a weight chosen by default.
    - `check_finite`: as in [`eqquant.quantize`][].
    - `progress`: show a progress bar, for which tqdm must be installed. By default only
        for large models in a terminal.

    **Returns:**

    A pytree of the same type, its weights replaced by [`eqquant.QuantizedArray`][].
    Leaves are quantized one after the other.

    **Raises:**

    - `ValueError` or `TypeError` if an argument is not valid, or (naming the path) a
        weight cannot be quantized.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    format = None if format is None else as_format(format)
    ordered = Rules(rules)
    leaves, treedef = jax.tree.flatten(model, is_leaf=_is_quantized)
    mask = None if where is None else filter_mask(where, model)
    if mask is not None and len(mask) != len(leaves):
        raise ValueError("quantize_tree: where must be a pytree prefix of model.")

    plan: list[tuple[int, str, Format, Any]] = []
    for i, site in enumerate(sites(model)):
        if not eqx.is_array(site.leaf) and not isinstance(site.leaf, np.ndarray):
            continue
        kind = classify(site)
        natural = kind.axis if isinstance(kind, Weight) else -1
        rule = ordered.find(site)
        if rule is not None:
            if rule.format is not None:
                axis = natural if rule.axis is None else rule.axis
                plan.append((i, site.path, as_format(rule.format), axis))
        elif format is not None and mask is not None:
            if mask[i]:
                plan.append((i, site.path, format, natural))
        elif (
            format is not None
            and isinstance(kind, Weight)
            and not too_small(site.leaf, format, natural, min_size)
        ):
            plan.append((i, site.path, format, natural))
    if ordered.unused():
        unused = ordered.unused()
        warn(f"quantize_tree: these rules match nothing: {unused}.", UserWarning)

    for i, path, chosen, axis in _with_progress(plan, leaves, progress):
        try:
            leaves[i] = quantize(
                leaves[i], chosen, axis=axis, check_finite=check_finite
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"quantize_tree: at {path}: {error}") from error
    return jax.tree.unflatten(treedef, leaves)


def too_small(leaf, format: Format, axis, min_size: int = 256) -> str | None:
    """Why a weight is not worth quantizing, if it is not."""
    if leaf.size < min_size:
        return f"smaller than {min_size}"
    axes = (axis,) if isinstance(axis, int) else axis
    size = math.prod(leaf.shape[a] for a in axes)
    scales = format.num_blocks(size) * format.scale_dtype.itemsize
    stored = format.padded(size) * format.bits / 8 + scales
    if stored >= size * leaf.dtype.itemsize:
        return f"no smaller as {format!r}"
    return None


def _with_progress(plan: list, leaves: list, progress: bool | None):
    if progress is None:
        work = sum(leaves[i].size for i, *_ in plan)
        progress = work >= _long_work and sys.stderr.isatty()
        try:
            import tqdm
        except ImportError:
            progress = False
    if not progress:
        return plan
    try:
        import tqdm
    except ImportError as error:
        raise ImportError(
            "quantize_tree: progress=True needs tqdm: `pip install eqquant[progress]`."
        ) from error
    return tqdm.tqdm(plan, desc="quantizing", unit="array")


@typed
def dequantize_tree(model: Tree) -> Tree:
    """The model with every quantized array dequantized."""
    return jax.tree.map(
        lambda x: x.dequantize() if _is_quantized(x) else x,
        model,
        is_leaf=_is_quantized,
    )


@typed
def is_quantized(x: Any) -> bool:
    """Whether `x` is a quantized array. Use it as `is_leaf` to treat them as leaves."""
    return _is_quantized(x)


@typed
def trainable_mask(model: Any) -> Any:
    """Which leaves to train: floating-point arrays, but nothing of a quantized array.

    `eqx.is_inexact_array` alone is true of the scales of a quantized array, and so
    would train them.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, "nf4")
        trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
        assert trainable.layers[0].weight.scales is None
        assert trainable.layers[0].bias is not None
        ```

    **Arguments:**

    - `model`: any pytree.

    **Returns:**

    A pytree prefix of `model`, of bools: for `eqx.partition`, `eqx.filter` and
    `optax.masked`.
    """
    return jax.tree.map(
        lambda x: not _is_quantized(x) and eqx.is_inexact_array(x),
        model,
        is_leaf=_is_quantized,
    )


@typed
def tree_nbytes(model: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(model)
        if hasattr(x, "shape") and hasattr(x, "dtype")
    )


@typed
def map_quantized(fn: Callable[[QuantizedArray], Any], model: Tree) -> Tree:
    """The model with `fn` applied to every quantized array."""
    return jax.tree.map(
        lambda x: fn(x) if _is_quantized(x) else x, model, is_leaf=_is_quantized
    )
