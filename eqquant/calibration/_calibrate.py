"""The calibration pass."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._jax import typed, warn, wide_dtype
from ..trees import (
    check_forward,
    Choice,
    choose,
    each_batch,
    float_arrays,
    replace_base,
    replace_chosen,
    sites,
)
from ._statistics import matrix_axes_of, Statistics, WeightStatistics
from .observed import Observed, ObservedArray


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
        Set it if the products of some weights are still multiplied by zero.
    - `progress`: show a progress bar, which requires tqdm. The default shows it for
        large models in a terminal.

    **Returns:**

    [`eqquant.calibration.Statistics`][], in float32 (float64 for weights in float64).

    A warning names the weights without data.

    **Raises:**

    - `ValueError` if there are no batches, if no weight is chosen, if a result or an
        input of a weight is not finite, or if `fn` returns no floating-point array.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    check_forward(fn, model, batches, _caller)
    choices = choose(
        model, "nf4", where=where, rules=rules, min_size=min_size, caller=_caller
    )
    if not choices:
        raise ValueError(
            f"{_caller}: no weight is chosen, so there are no inputs to observe. See "
            "where, rules and min_size."
        )
    leaves = [site.leaf for site in sites(model)]
    all_axes, zeros = {}, {}
    for choice in choices:
        leaf = leaves[choice.index]
        axes = matrix_axes_of(choice, leaf.ndim)
        stack = [leaf.shape[a] for a in axes.stack]
        size = math.prod(leaf.shape[a] for a in axes.inputs)
        dtype = wide_dtype(leaf.dtype)
        all_axes[choice.path] = axes
        zeros[choice.path] = Observed.zeros(stack, size, dtype)

    def observed(model, sums):
        def observe(leaf, choice: Choice):
            axes, weight_sums = all_axes[choice.path], sums[choice.path]
            args = weight_sums, axes.inputs, axes.stack, every_row
            return replace_base(lambda w: ObservedArray(jnp.asarray(w), *args), leaf)

        return replace_chosen(observe, model, choices, caller=_caller)

    @eqx.filter_jit
    def step(total, model, batch, key):
        def project(zeros):
            return _project(fn(observed(model, zeros), batch), key)

        sums = jax.grad(project)(zeros)
        is_finite = {path: _is_finite(x) for path, x in sums.items()}
        return jax.tree.map(jnp.add, total, sums), is_finite

    total, elements = zeros, sum(x.gram.size for x in zeros.values())
    for i, batch in each_batch(
        batches, elements, progress, caller=_caller, title="calibrating"
    ):
        key = jax.random.fold_in(jax.random.key(0), i + 1)
        total, is_finite = step(total, model, batch, key)
        if wrong := [path for path, ok in is_finite.items() if not ok]:
            raise ValueError(
                f"{_caller}: activations must be finite, but batch {i} has "
                f"inputs of {wrong[:5]} that are not."
            )
    stats = {}
    for choice in choices:
        sums, shape = total[choice.path], tuple(leaves[choice.index].shape)
        stats[choice.path] = WeightStatistics(
            sums.gram,
            sums.rows,
            sums.power,
            shape,
            all_axes[choice.path],
            choice.is_table,
        )
    if missing := [path for path, known in stats.items() if not known.is_reached]:
        warn(
            f"{_caller}: the data never reached {missing}. They will be rounded "
            "plainly, to the nearest level.",
            UserWarning,
        )
    return Statistics(stats)


def _is_finite(sums: Observed) -> Any:
    return jnp.all(jnp.isfinite(sums.gram)) & jnp.all(jnp.isfinite(sums.power))


def _project(results: Any, key) -> Any:
    """Return the sum of the results with random signs.

    Its gradient depends on all results, which do not cancel.
    """
    arrays = float_arrays(results)
    if not arrays:
        raise ValueError(
            f"{_caller}: fn must return floating-point arrays, got {results!r}."
        )
    total = jnp.zeros(())
    for i, array in enumerate(arrays):
        signs = jax.random.rademacher(jax.random.fold_in(key, i), array.shape)
        total += jnp.sum(jnp.real(array) * signs).astype(total.dtype)
    return total
