"""The calibration pass."""

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._jax import typed, warn
from ..arrays import LoraArray, Observed, ObservedArray
from ..trees import Choice, choose, replace_chosen, sites, with_progress
from ._layout import Layout
from ._statistics import Statistics, statistics_of


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
    - `every_row`: also count rows without influence on the results. By default they are
        left out, because they are padding, or rows that a router sent to other experts.
        Set it if the products of some weights are still multiplied by zero.
    - `progress`: show a progress bar, which requires tqdm. By default only for large
        models in a terminal.

    **Returns:**

    [`eqquant.calibration.Statistics`][], in float32 (float64 for weights in float64).

    A warning names the weights without data.

    **Raises:**

    - `ValueError` if there are no batches, if no weight is chosen, if a result or an
        input of a weight is not finite, or if `fn` returns no floating-point array.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    choices = choose(
        model, "nf4", where=where, rules=rules, min_size=min_size, caller=_caller
    )
    if not choices:
        raise ValueError(
            f"{_caller}: nothing is chosen, so there is nothing to observe. Choose "
            "weights with where, rules and min_size."
        )
    leaves = [site.leaf for site in sites(model)]
    layouts, zeros = {}, {}
    for choice in choices:
        leaf = leaves[choice.index]
        layout = Layout.of(choice.axis, choice.out, choice.is_table, leaf.ndim)
        lead = [leaf.shape[a] for a in layout.lead]
        size = int(np.prod([leaf.shape[a] for a in layout.axes]))
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        layouts[choice.path] = layout
        zeros[choice.path] = Observed.nothing(lead, size, dtype)

    def observed(model, seen):
        def one(leaf, choice: Choice):
            if isinstance(leaf, LoraArray):
                return leaf.replace(base=one(leaf.base, choice))
            layout = layouts[choice.path]
            base, of_leaf = jnp.asarray(leaf), seen[choice.path]
            return ObservedArray(base, of_leaf, layout.axes, layout.lead, every_row)

        return replace_chosen(one, model, choices, caller=_caller)

    @eqx.filter_jit
    def step(total, model, batch, key):
        def project(zeros):
            return _project(fn(observed(model, zeros), batch), key)

        seen = jax.grad(project)(zeros)
        is_finite = jax.tree.map(
            lambda x: jnp.all(jnp.isfinite(x.gram)) & jnp.all(jnp.isfinite(x.power)),
            seen,
            is_leaf=lambda x: isinstance(x, Observed),
        )
        return jax.tree.map(jnp.add, total, seen), is_finite

    work = sum(x.gram.size for x in zeros.values())
    work *= len(batches) if isinstance(batches, Sized) else 1
    total, count = zeros, 0
    shown = with_progress(
        batches, work, progress, caller=_caller, what=("calibrating", "batch")
    )
    for count, batch in enumerate(shown, 1):
        key = jax.random.fold_in(jax.random.key(0), count)
        total, is_finite = step(total, model, batch, key)
        if wrong := [path for path, ok in is_finite.items() if not ok]:
            raise ValueError(
                f"{_caller}: activations must be finite, but those of {wrong[:5]} are "
                f"not, in batch {count - 1}."
            )
    if not count:
        raise ValueError(f"{_caller}: batches must hold at least one batch, got none.")
    stats = {}
    for choice in choices:
        shape, layout = leaves[choice.index].shape, layouts[choice.path]
        seen = total[choice.path]
        stats[choice.path] = statistics_of(seen, shape, layout, choice.is_table)
    if missing := [path for path, known in stats.items() if not known.is_reached]:
        warn(
            f"{_caller}: the data never reached {missing}. They will be rounded "
            "plainly, to the nearest level.",
            UserWarning,
        )
    return Statistics(stats)


def _project(results: Any, key) -> Any:
    """Return the sum of the results with random signs.

    Its gradient depends on all results, which do not cancel.
    """
    arrays = [x for x in jax.tree.leaves(results) if eqx.is_inexact_array(x)]
    if not arrays:
        raise ValueError(
            f"{_caller}: fn must return arrays of floating point, got {results!r}."
        )
    total = jnp.zeros(())
    for i, array in enumerate(arrays):
        signs = jax.random.rademacher(jax.random.fold_in(key, i), array.shape)
        total += jnp.sum(jnp.real(array) * signs).astype(total.dtype)
    return total
