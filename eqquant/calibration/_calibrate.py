"""The calibration pass."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from .._jax import counted, has_explicit_axes, typed, warn
from ..arrays import is_quantized
from ..trees import base_of, check_forward, choose, sites
from ._collect import collect
from ._pairs import changes
from ._statistics import Statistics, WeightStatistics


_caller = "calibrate"


@typed
def calibrate(
    fn: Callable,
    model: Any,
    batches: Iterable,
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
    every_row: bool = False,
    gradients_every: int | None = 1,
    curvature: bool = False,
    quantized: Any = None,
    progress: bool | None = None,
) -> Statistics:
    """Run a model on data, and collect statistics of the inputs of each weight.

    Model code does not change, and may use `jit`, `vmap`, `scan` and `checkpoint`. Each
    weight is replaced by an array with the same products. The statistics are gradients
    with respect to a part of that array.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), 4)
        batches = [jax.random.normal(key, (32, 64)) for key in keys]
        stats = eqquant.calibrate(lambda model, x: jax.vmap(model)(x), model, batches)
        assert stats.weights["layers.0.weight"].gram.shape == (64, 64)
        assert stats.weights["layers.0.weight"].rows == 4 * 32
        model = eqquant.quantize_tree(model, "nf4", calibration=stats)
        ```

    **Arguments:**

    - `fn`: `fn(model, batch)`, the forward pass. It returns a pytree with
        floating-point arrays. Rows without influence on these arrays count as padding.
    - `model`: any pytree that is not quantized yet.
    - `batches`: an iterable of batches for `fn`. `fn` is compiled once per batch shape.
        A few hundred sentences suffice, if they cover most of the vocabulary.
    - `where`, `rules`, `min_size`: the observed weights, as in
        [`eqquant.quantize_tree`][]. Pass the same values to both functions. The
        statistics take `size**2` floats for each matrix with `size` contracted values.
        If memory is short, calibrate a part of the weights at a time.
    - `every_row`: also count rows without influence on the results. The default leaves
        them out, because they are padding, or rows that a router sent to other experts.
        Set it if the products of some weights are still multiplied by zero, or for text
        without padding, to save time.
    - `gradients_every`: with `every_row`, run the backward pass only for every n-th
        batch, for example `4`; `None` for none. GPTQ of products needs no gradients.
        [`eqquant.allocate`][], the losses of [`eqquant.report`][] and statistics of
        lookups need them.
    - `curvature`: for each weight, sum the outer products of the rows of its gradient
        instead of the outer products of its inputs. If `fn` returns `2 * sqrt(p)` for
        the probabilities `p` of a language model, the sums are the second derivatives
        of the KL divergence for changes of one output: the input side of YAQA's sketch
        B (arXiv 2505.22988). Pass one sequence per batch.
    - `quantized`: this model with some weights quantized (GPTAQ, arXiv 2504.02692).
        Statistics of products then contain the inputs in `quantized`, and their shift
        from the inputs in `model`. With these statistics, `quantize_tree` corrects each
        weight for the shift before it rounds. Quantize weights in the order in which
        `fn` uses them, and calibrate again after each step: corrections of all weights
        from one pass add up, and the model gets worse. Both models run on each batch as
        one model under `jax.vmap`. Lookups are not corrected.
    - `progress`: show a progress bar, which requires tqdm. The default shows it for
        large models in a terminal.

    **Returns:**

    [`eqquant.calibration.Statistics`][], in float32 (float64 for weights in float64).

    Warnings name the weights without data, batches with tokens out of bounds, and
    observed weights that `quantized` already contains quantized.

    **Raises:**

    - `ValueError` if there are no batches, if no weight is chosen, if a result or an
        input of a weight is not finite, if `fn` returns no floating-point array, if
        `gradients_every` is not positive, or not 1 without `every_row`, or None with
        `curvature`, or if `quantized` has another structure than `model`, or if it is
        passed with `curvature` or in a mesh with explicit axes.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    check_forward(fn, model, batches, _caller)
    is_valid = gradients_every is None or gradients_every > 0
    if gradients_every != 1 and not (every_row and is_valid):
        raise ValueError(
            f"{_caller}: gradients_every must be a positive integer or None, and 1 "
            f"without every_row, got {gradients_every}. Only gradients show which rows "
            "are padding: pass every_row=True if there is none."
        )
    if curvature and gradients_every is None:
        raise ValueError(
            f"{_caller}: curvature=True needs gradients, got gradients_every=None. "
            "Pass a positive integer."
        )
    choices = choose(
        model, "nf4", where=where, rules=rules, min_size=min_size, caller=_caller
    )
    if not choices:
        hint = "See where, rules and min_size."
        if any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized))):
            hint = "The model is quantized already: calibrate the float model."
        raise ValueError(
            f"{_caller}: no weight is chosen, so there are no inputs to observe. {hint}"
        )
    changed = None
    if quantized is not None:
        _check_pair(curvature)
        changed = changes(model, quantized, _caller)
        leaves = [base_of(site.leaf) for site in sites(quantized)]
        _warn_of_quantized([c.path for c in choices if is_quantized(leaves[c.index])])
    how = every_row, gradients_every, progress, curvature, changed
    observed = collect(fn, model, batches, choices, *how, caller=_caller)
    stats = {one.path: one.statistics() for one in observed}
    _warn_of_data(stats)
    return Statistics(stats)


def _check_pair(curvature: bool) -> None:
    if curvature:
        raise ValueError(
            f"{_caller}: quantized must be None with curvature=True, which contains no "
            "inputs to compare, got a model. Leave out one of the two arguments."
        )
    if has_explicit_axes():
        raise ValueError(
            f"{_caller}: quantized must be None in a mesh with explicit axes, got a "
            "model. Call calibrate outside of `jax.set_mesh`, or with axes of the type "
            "`Auto`."
        )


def _warn_of_quantized(paths: list[str]) -> None:
    """Warn about observed weights that are quantized already."""
    if paths:
        warn(
            f"{_caller}: quantized already contains "
            f"{counted(len(paths), 'weight', 'weights')} to observe, such as "
            f"{paths[0]!r}. Corrections of several layers after one pass add up, and "
            "the model may get worse. Observe only the next weights, by where or "
            "rules, and quantize them before the next pass.",
            UserWarning,
        )


def _warn_of_data(stats: Mapping[str, WeightStatistics]) -> None:
    """Warn about weights, and matrices of stacks, with no data or little data."""
    if missing := [path for path, known in stats.items() if not known.is_reached]:
        warn(
            f"{_caller}: data (other than zeros) never reached {missing}. They will be "
            "rounded plainly, to the nearest level.",
            UserWarning,
        )
    parts, few = [], []
    for path, known in stats.items():
        rows, size = np.asarray(known.rows), known.gram.shape[-1]
        if known.is_reached and (unreached := np.sum(~known.reached)):
            parts.append(f"{unreached} of {rows.size} matrices of {path}")
        least = min(rows[rows > 0], default=size)
        if least < size and not known.is_table:
            few.append(f"{path} ({least:,.0f} rows of {size:,} inputs)")
    if parts:
        warn(
            f"{_caller}: data (other than zeros) never reached {', '.join(parts[:5])}. "
            "They will be rounded plainly, to the nearest level.",
            UserWarning,
        )
    if few:
        warn(
            f"{_caller}: {counted(len(few), 'weight has', 'weights have')} fewer rows "
            f"than inputs, such as {few[0]}. GPTQ then fits the data rather "
            "than its distribution. Use more batches.",
            UserWarning,
        )
