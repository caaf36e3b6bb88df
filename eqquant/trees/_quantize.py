"""Quantized models: whole pytrees."""

from collections.abc import Mapping
from typing import Any, get_args, Literal

import jax
import jax.numpy as jnp

from .._jax import typed, warn
from ..arrays import (
    canonical_axes,
    dequantize,
    is_quantized,
    LoraArray,
    quantize,
    rotated,
    RotatedArray,
)
from ..formats import Format
from ..kernels import as_compute, Compute
from ._calibration import AbstractCalibration
from ._choice import Choice, choose, leaves_of, replace_chosen
from ._layers import match_layers
from ._progress import with_progress
from ._report import report
from ._sites import sites, Tree


Method = Literal["gptq", "nearest"]


@typed
def quantize_tree(
    model: Tree,
    format: Format | str | None = "nf4",
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
    calibration: AbstractCalibration | None = None,
    method: str = "gptq",
    rotate: bool = False,
    check_finite: bool = True,
    progress: bool | None = None,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> Tree:
    """Quantize the weights of a model, or of any pytree.

    By default these are the weights of `eqx.nn.Linear`, `Embedding`, `Conv`,
    `ConvTranspose`, `GRUCell` and `LSTMCell`, stacked layers included. The layers of
    Haliax, Flax (Linen's dictionaries, NNX modules and states), Haiku and stax are
    known as well; [`eqquant.trees.register_weights`][] adds yours. Everything else
    stays as it is: biases, norms, PReLU, the insides of SpectralNorm and WeightNorm.
    So does a weight that is smaller than `min_size`, or would not get any smaller. If
    nothing at all is chosen, a warning lists the largest arrays and why each was left
    alone.

    A convolution of `eqx.nn` becomes a subclass of itself, which calls itself through
    [`eqquant.quaxify`][]; [`eqquant.dequantize_tree`][] gives the plain layer back.

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
        a format, its name, `None` (leave it), or an [`eqquant.trees.Rule`][] or a pair
        `(format, axis)`, which give the axis too. A pattern with wildcards leaves alone
        arrays of one axis and what is known not to be a weight; the exact path of a
        leaf does not. Rules that match nothing give a warning.
    - `min_size`: the least number of elements of a weight chosen by default.
    - `calibration`: what [`eqquant.calibrate`][] has seen of this model. Weights are
        then rounded such that their products with such data change least.
    - `method`: how, given `calibration`. `"gptq"`: column by column, where each makes
        up for the errors of those before (GPTQ, arXiv 2210.17323). Blocks get their
        scales on the way. The damping is 0.01 of the mean of the diagonal; 0.1 where
        the largest input is 100 times the median one. No row of a weight gets a larger
        error on the data than by plain rounding. `"nearest"`: plain rounding. A weight
        of which nothing is known is always rounded plainly. Formats with offsets, which
        GPTQ cannot use, fit them and their scales to the data if their `fit` is not
        `"absmax"`; others without `nearest` are rounded plainly.
    - `rotate`: rotate the contracted axis by Hadamard matrices before rounding, so that
        outliers are spread. Products rotate the activation. The blocks that are
        rotated are the largest power of two that divides the axis. Together with
        `calibration` this is the most accurate; by itself it may bring little.
    - `check_finite`: as in [`eqquant.quantize`][].
    - `progress`: show a progress bar, for which tqdm must be installed. By default only
        for large models in a terminal.
    - `precision`, `activations`, `compute`: as in [`eqquant.quantize`][]: how products
        with the quantized weights are computed.

    **Returns:**

    A pytree of the same type, its weights replaced by [`eqquant.QuantizedArray`][]; by
    [`eqquant.arrays.RotatedArray`][], which holds one, with `rotate`. They are
    quantized one after the other.

    **Raises:**

    - `ValueError` or `TypeError` if an argument is not valid, or (naming the path) a
        weight cannot be quantized.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    caller = "quantize_tree"
    compute = as_compute(compute, precision, activations)
    choices = choose(
        model, format, where=where, rules=rules, min_size=min_size, caller=caller
    )

    if not choices and format is not None:
        warn_of_nothing(model, caller)

    if method not in get_args(Method):
        raise ValueError(
            f"{caller}: method must be one of {get_args(Method)}, got {method!r}."
        )
    leaves = leaves_of(model)
    if calibration is not None:
        by_path = {site.path: site.leaf for site in sites(model)}
        by_data = choices if method == "gptq" else []
        calibration.check(by_path, by_data, caller)

    def rounded(array, choice: Choice, rotation: int):
        q = None
        if calibration is not None and method == "gptq":
            q = calibration.quantize(array, choice, rotation, check_finite)
        if q is not None:
            return q.with_static(compute=choice.compute or compute)
        return quantize(
            array,
            choice.format,
            axis=choice.axis,
            check_finite=check_finite,
            compute=choice.compute or compute,
        )

    def one(leaf, choice: Choice):
        if isinstance(leaf, LoraArray):
            return leaf.replace(base=one(leaf.base, choice))
        if not rotate or not leaf.ndim:
            return rounded(leaf, choice, 1)
        turned, block = rotated(leaf, canonical_axes(choice.axis, leaf.ndim)[-1])
        if block == 1:
            return rounded(leaf, choice, 1)
        q = rounded(turned, choice, block)
        return RotatedArray(q.replace(dtype=jnp.dtype(leaf.dtype)), block)

    elements = sum(leaves[choice.index].size for choice in choices)
    shown = with_progress(choices, elements, progress, caller=caller)
    return replace_chosen(one, model, shown, caller=caller)


def warn_of_nothing(model: Any, caller: str) -> None:
    """That nothing was chosen, and why the largest arrays were not."""
    rows = report(model).rows
    if any(row.format is not None for row in rows):
        return
    largest = sorted(rows, key=lambda row: row.bytes_before, reverse=True)[:5]
    message = f"{caller}: nothing was chosen."
    for row in largest:
        message += f"\n  {row.path or 'the array'} {row.shape}: {row.reason}"
    if paths := [row.path for row in largest if len(row.shape) > 1 and row.path]:
        message += f"\nA rule takes an array: `rules={{{paths[0]!r}: 'int8'}}`."
    message += "\n`eqquant.trees.register_weights` makes the weights of a layer known."
    warn(message, UserWarning)


@typed
def dequantize_tree(model: Tree) -> Tree:
    """The model with every quantized array dequantized; that below an adapter, too."""
    dense = jax.tree.map(dequantize, model, is_leaf=is_quantized)
    return match_layers(dense)
