"""Quantization of whole pytrees."""

from collections.abc import Mapping
from typing import Any, get_args, Literal

import jax
import jax.numpy as jnp

from .._jax import check_one_of, typed
from ..arrays import (
    canonical_axes,
    dequantize,
    is_quantized,
    quantize,
    rotated,
    RotatedArray,
)
from ..formats import Format
from ..kernels import as_compute, Compute
from ._calibration import AbstractCalibration
from ._choice import Choice, choose, leaves_of, replace_base, replace_chosen
from ._layers import match_layers
from ._left_out import warn_of_left_out
from ._progress import with_progress
from ._rotations import check_rotations, rotation_of, Rotations
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
    rotate: Rotations = False,
    search: int = 1,
    check_finite: bool = True,
    progress: bool | None = None,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> Tree:
    """Quantize the weights of a model, or of any pytree.

    By default this quantizes the weights of `eqx.nn.Linear`, `Embedding`, `Conv`,
    `ConvTranspose`, `GRUCell` and `LSTMCell`, including stacked layers, and of layers
    of Haliax, Flax (Linen's dictionaries, NNX modules and states), Haiku and stax. It
    also recognises layers by their fields: `num_spatial_dims` and `kernel_size`,
    `in_features` and `out_features`, or a `weight` of 3 to 5 axes beside `stride` or
    `padding`. [`eqquant.trees.register_weights`][] adds your own layers. All other
    arrays are unchanged: biases, norms, PReLU, arrays inside of SpectralNorm and
    WeightNorm, weights smaller than `min_size`, and weights that would not become
    smaller. If no weight is chosen, a warning lists the largest arrays with the
    reasons. If more than a fifth of the bytes stays in floating point, a warning names
    the largest array.

    A convolution, or a layer that is recognised by its fields, becomes a subclass that
    runs inside of [`eqquant.quaxify`][]. [`eqquant.dequantize_tree`][] restores the
    plain layer.

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
    - `format`: a format, or the name of one; `None` to quantize only by rules.
    - `where`: the leaves to quantize, like a filter of `eqx.filter`: a function
        `leaf -> bool`, or a pytree prefix of bools. By default, known weights.
    - `rules`: an ordered mapping `{pattern: what}` that precedes the default; the first
        pattern that matches the path of a leaf wins. A path is `layers.0.weight`, for
        example. A pattern is a string with the wildcards `*` and `?`, or a compiled
        regular expression. `what` is a format, its name, `None` (leave unchanged), an
        [`eqquant.trees.QuantizationRule`][], or a pair `(format, axis)`. Patterns with
        wildcards skip arrays with one axis, and arrays that are known not to be
        weights; exact paths do not. Rules without a match cause a warning.
    - `min_size`: the smallest number of elements of a weight that is chosen by default.
    - `calibration`: the result of [`eqquant.calibrate`][] for this model. Rounding then
        minimises the change of products with such data. Statistics of
        `calibrate(quantized=...)` also correct each weight before it is rounded.
    - `method`: the rounding with `calibration`. `"gptq"` rounds column by column, and
        later columns compensate for the errors of earlier ones (GPTQ, arXiv
        2210.17323). Scales of blocks are chosen on the way. The damping is 0.01 of the
        mean of the diagonal, or 0.1 if the largest input is 100 times the median; it
        grows tenfold until the matrix is positive definite. No
        row gets a larger error on the data than by rounding to nearest. `"nearest"`
        rounds to nearest, like weights without data. GPTQ does not support offsets:
        formats with offsets fit scales and offsets to the data, unless `fit="absmax"`.
        Formats without `nearest` are rounded to nearest.
    - `rotate`: rotate the contracted axis by Hadamard matrices before rounding, which
        spreads outliers. Products rotate the activation. The block is the largest power
        of two that divides the axis, and at most `rotate` if it is a number: with the
        block size of a format such as MXFP4, values are only rotated within their
        block. This is most accurate with `calibration`; without it, the gain may be
        small. A mapping `{pattern: value}` gives the value of each weight by its path:
        the first pattern that matches wins, and other weights are not rotated.
        [`eqquant.calibration.fold_rotations`][] returns one.
    - `search`: the number of roundings of each row that GPTQ keeps while it rounds a
        block (the M-algorithm), for example 16. Each has its own error feedback. The
        time grows with the number. Formats of eight bits are not searched.
        [`eqquant.formats.Trellis`][] keeps 32 roundings by default.
    - `check_finite`: as in [`eqquant.quantize`][].
    - `progress`: show a progress bar, which requires tqdm. The default shows it for
        large models in a terminal.
    - `precision`, `activations`, `compute`: the settings of products with the quantized
        weights, as in [`eqquant.quantize`][].

    **Returns:**

    A pytree of the same type, with an [`eqquant.QuantizedArray`][] for each weight;
    with `rotate`, an [`eqquant.arrays.RotatedArray`][]. Weights are quantized one at a
    time.

    **Raises:**

    - `ValueError` or `TypeError` if an argument is invalid, or if a weight cannot be
        quantized; the message names its path.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    caller = "quantize_tree"
    compute = as_compute(compute, precision, activations)
    options = {"where": where, "rules": rules, "min_size": min_size}
    choices = choose(model, format, caller=caller, **options)
    warn_of_left_out(model, choices, format, caller=caller, **options)
    check_one_of(caller, "method", method, get_args(Method))
    check_rotations(caller, rotate)
    if not 1 <= search <= 1024:
        raise ValueError(f"{caller}: search must be from 1 to 1024, got {search}.")
    leaves, round_by_data = leaves_of(model), None
    if calibration is not None:
        by_path = {site.path: site.leaf for site in sites(model)}
        by_data = choices if method == "gptq" else []
        calibration.check(by_path, by_data, caller)
        round_by_data = calibration.rounder(search) if method == "gptq" else None

    def rounded(array, choice: Choice, rotation: int):
        q = None
        if round_by_data is not None:
            q = round_by_data(array, choice, rotation, check_finite)
        if q is not None:
            return q.with_static(compute=choice.compute or compute)
        return quantize(
            array,
            choice.format,
            axis=choice.axis,
            check_finite=check_finite,
            compute=choice.compute or compute,
        )

    def quantize_weight(weight, choice: Choice):
        largest = rotation_of(choice.path, rotate)
        if not largest or not weight.ndim:
            return rounded(weight, choice, 1)
        axis = canonical_axes(choice.axis, weight.ndim)[-1]
        rotated_weight, block = rotated(weight, axis, largest)
        if block == 1:
            return rounded(weight, choice, 1)
        q = rounded(rotated_weight, choice, block)
        return RotatedArray(q.replace(dtype=jnp.dtype(weight.dtype)), block)

    def quantize_leaf(leaf, choice: Choice):
        return replace_base(lambda weight: quantize_weight(weight, choice), leaf)

    elements = sum(leaves[choice.index].size for choice in choices)
    shown = with_progress(choices, elements, progress, caller=caller)
    return replace_chosen(quantize_leaf, model, shown, caller=caller)


@typed
def dequantize_tree(model: Tree) -> Tree:
    """Dequantize every quantized array of a model, including those below adapters.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        quantized = eqquant.quantize_tree(model, "int8")
        dense = eqquant.dequantize_tree(quantized)
        assert dense.layers[0].weight.shape == (256, 64)
        ```
    """
    dense = jax.tree.map(dequantize, model, is_leaf=is_quantized)
    return match_layers(dense)
