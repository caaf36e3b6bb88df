"""Collect statistics of the inputs of weights while a model runs on data."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._jax import wide_dtype
from ..arrays import MatrixAxes
from ..trees import (
    base_of,
    Choice,
    each_batch,
    float_arrays,
    replace_base,
    replace_chosen,
    sites,
)
from ._indices import index_check
from ._pairs import sum_of_both
from ._statistics import matrix_axes_of, WeightStatistics
from .observed import Observed, ObservedArray, symmetric, Uses


# Inputs are scaled if the mean of the largest magnitude of each row is outside of these
# bounds: squares in float32 would lose precision or overflow.
_smallest, _largest = 2.0**-20, 2.0**30
# Gradients are noisier than inputs: damping of their Gram matrices, relative to the
# mean of the diagonal. It was chosen with rotated weights of SmolLM2 in NF4.
_curvature_damping = 0.1
# The unit if the sum of the largest magnitudes overflows.
_tiny_unit = 2.0**-64
# Statistics of products and lookups, by the path of the weight.
_Sums = Mapping[str, tuple[Observed | None, Observed | None]]


@dataclasses.dataclass
class ObservedWeight:
    """A weight that is being observed.

    **Fields:**

    - `choice`, `shape`, `axes`, `zeros`: the weight, its shape, its axes, and the
        initial statistics.
    - `unit`: a power of two, by which inputs are multiplied.
    - `products`, `lookups`: statistics of both uses, or None.
    - `curvature`: whether `lookups` contains the gradients of both uses.
    """

    choice: Choice
    shape: tuple[int, ...]
    axes: MatrixAxes
    zeros: Callable[[], Observed]
    unit: float = 1.0
    products: Observed | None = None
    lookups: Observed | None = None
    curvature: bool = False

    @classmethod
    def of(
        cls, choice: Choice, leaf: Any, curvature: bool, paired: bool
    ) -> "ObservedWeight":
        axes = matrix_axes_of(choice, leaf.ndim)
        stack = [leaf.shape[a] for a in axes.stack]
        size = math.prod(leaf.shape[a] for a in axes.inputs)
        dtype = wide_dtype(leaf.dtype)
        zeros = lambda: Observed.zeros(stack, size, dtype, paired)
        return cls(choice, tuple(leaf.shape), axes, zeros, curvature=curvature)

    @property
    def path(self) -> str:
        return self.choice.path

    def allocate(self, uses: Uses, with_gradients: bool) -> None:
        """Allocate statistics for the uses of the weight."""
        # Statistics of lookups are gradients.
        has_lookups = uses.has_lookups and (with_gradients or not uses.has_products)
        if self.curvature or has_lookups:
            self.lookups = dataclasses.replace(self.zeros(), shift=None)
        if not self.curvature and (uses.has_products or not uses.has_lookups):
            self.products = self.zeros()

    def rescale(self, unit: float) -> None:
        """Change the unit of the inputs that were observed."""
        if (seen := self.products) is not None:
            factor = unit / self.unit
            squared = lambda sums: jax.tree.map(lambda x: x * factor * factor, sums)
            self.products = dataclasses.replace(
                seen,
                gram=squared(seen.gram),
                peak=seen.peak * factor,
                shift=squared(seen.shift),
            )
        self.unit = unit

    def scale_gradients(self, factor: float) -> None:
        """Multiply the sums that depend on gradients."""
        if factor == 1:
            return
        if (seen := self.products) is not None:
            self.products = dataclasses.replace(seen, power=seen.power * factor)
        if math.isfinite(factor):
            self.lookups = jax.tree.map(lambda part: part * factor, self.lookups)

    def better_unit(self, peak: float, rows: float) -> float:
        """Return the unit for a batch with a sum of peaks, in the current unit."""
        if math.isnan(peak):
            return self.unit
        if math.isinf(peak):  # Maybe the sum only: all inputs may be finite.
            return min(self.unit, _tiny_unit)
        mean = peak / rows if rows else 0.0
        assert self.products is not None
        is_new = not np.any(np.asarray(self.products.rows))
        if mean > _largest or (is_new and 0 < mean < _smallest):
            return 2.0 ** round(math.log2(self.unit / mean))
        return self.unit

    def statistics(self) -> WeightStatistics:
        """Return the statistics of both uses.

        With both, rows of `X` are the gradients of the lookups, and the inputs of
        products times the root mean square of their gradients. So a row of the weight
        has the same expected loss in both.
        """
        products, lookups = self.products, self.lookups
        own = self.shape, self.axes
        if self.curvature:
            assert lookups is not None
            sums = damped(symmetric(lookups.gram)), lookups.rows, lookups.power
            return WeightStatistics(*sums, *own, True)
        if lookups is None:
            assert products is not None
            sums = symmetric(products.gram), products.rows, products.power
            options = self.choice.is_table, self.unit, products.shift
            return WeightStatistics(*sums, *own, *options)
        if products is None:
            sums = symmetric(lookups.gram), lookups.rows, lookups.power
            return WeightStatistics(*sums, *own, True)
        gain = products.power / jnp.maximum(products.rows, 1)
        factor = jnp.sqrt(gain)[..., None, None] / self.unit
        gram = symmetric(lookups.gram + products.gram * factor * factor)
        sums = gram, lookups.rows + products.rows, lookups.power + products.power
        return WeightStatistics(*sums, *own, True)


def damped(gram: Float[Array, "*stack size size"]) -> Float[Array, "*stack size size"]:
    mean = jnp.mean(jnp.diagonal(gram, axis1=-2, axis2=-1), -1)
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return gram + _curvature_damping * mean[..., None, None] * identity


def collect(
    fn: Callable,
    model: Any,
    batches: Iterable,
    choices: Sequence[Choice],
    every_row: bool,
    gradients_every: int | None,
    progress: bool | None,
    curvature: bool,
    changed: list | None,
    *,
    caller: str,
) -> list[ObservedWeight]:
    """Run `fn(model, batch)` for each batch, and observe the chosen weights.

    Sums that depend on gradients are measured on every `gradients_every`-th batch, and
    scaled to all batches. With None, the power is NaN. With `curvature`, products are
    observed like lookups. `changed` is the result of [`changes`][] for a quantized
    model, whose inputs are then observed, or None.
    """
    models, paired = (model, changed), changed is not None
    leaves = [site.leaf for site in sites(model)]
    weights = {
        c.path: ObservedWeight.of(c, base_of(leaves[c.index]), curvature, paired)
        for c in choices
    }

    def observed(model, sums: _Sums, uses: dict[str, Uses]):
        def observe(leaf, choice: Choice):
            weight = weights[choice.path]
            axes = weight.axes.inputs, weight.axes.stack
            options = {"unit": weight.unit, "uses": uses.get(choice.path)}
            options |= {"curvature": curvature, "paired": paired}
            args = *sums[choice.path], *axes, every_row
            return replace_base(
                lambda w: ObservedArray(jnp.asarray(w), *args, **options), leaf
            )

        return replace_chosen(observe, model, choices, caller=caller)

    def project(sums: _Sums, models, batch, key, uses):
        def run(model):
            return _project(fn(observed(model, sums, uses), batch), key, caller)

        return sum_of_both(run, *models)

    def find_uses(batch, key) -> None:
        """Allocate statistics for the uses of each weight, by tracing `fn` once."""
        uses = {path: Uses() for path in weights}
        dynamic, static = eqx.partition((models, batch), eqx.is_array)

        def traced(dynamic):
            sums = {path: (w.zeros(), w.zeros()) for path, w in weights.items()}
            models, batch = eqx.combine(dynamic, static)
            return project(sums, models, batch, key, uses)

        jax.make_jaxpr(traced)(dynamic)
        for path, weight in weights.items():
            weight.allocate(uses[path], bool(gradients_every))

    def new_step():
        @eqx.filter_jit
        def step(total: _Sums, models, batch, key, with_gradients: bool):
            zeros = jax.tree.map(jnp.zeros_like, total)
            sums = jax.grad(project)(zeros, models, batch, key, {})
            if not with_gradients:
                sums = {path: _without_gradients(*x) for path, x in sums.items()}
            checks = {path: _checks(*of_path) for path, of_path in sums.items()}
            return sums, checks

        return step

    step, count, measured = new_step(), 0, 0
    check_indices = index_check(fn, caller)
    size = sum(math.prod(jax.eval_shape(w.zeros).gram.shape) for w in weights.values())
    for i, batch in each_batch(
        batches, size, progress, caller=caller, title="calibrating"
    ):
        key = jax.random.fold_in(jax.random.key(0), i + 1)
        check_indices(model, batch, i)
        if i == 0:
            find_uses(batch, key)
        total = {path: (w.products, w.lookups) for path, w in weights.items()}
        while True:
            has_gradients = bool(gradients_every) and i % gradients_every == 0
            sums, checks = step(total, models, batch, key, has_gradients)
            checks = jax.device_get(checks)
            if not _rescale(weights, checks):
                break
            step = new_step()
            total = {path: (w.products, w.lookups) for path, w in weights.items()}
        count, measured = count + 1, measured + has_gradients
        _require_finite(checks, i, caller)
        for path, (products, lookups) in _add(total, sums).items():
            weights[path].products, weights[path].lookups = products, lookups
    for weight in weights.values():
        weight.scale_gradients(count / measured if measured else math.nan)
    return list(weights.values())


# In place, because the sums are the largest arrays of a calibration.
@ft.partial(jax.jit, donate_argnums=0)
def _add(total: _Sums, sums: _Sums) -> _Sums:
    return jax.tree.map(jnp.add, total, sums)


def _without_gradients(products: Observed | None, lookups: Observed | None) -> tuple:
    """Leave out the sums that depend on gradients, so that the compiler removes the
    backward pass."""
    zeros = lambda x: jax.tree.map(jnp.zeros_like, x)
    if products is not None:
        products = dataclasses.replace(products, power=jnp.zeros_like(products.power))
    return products, zeros(lookups)


def _rescale(weights: dict[str, ObservedWeight], checks: dict[str, tuple]) -> bool:
    """Change units for a batch. Return whether the batch must be repeated."""
    changed = False
    for path, (_, peak, rows) in checks.items():
        weight = weights[path]
        if weight.products is None:
            continue
        unit = weight.better_unit(float(peak), float(rows))
        if unit != weight.unit:
            weight.rescale(unit)
            changed = True
    return changed


def _checks(products: Observed | None, lookups: Observed | None) -> tuple:
    """Return whether all sums are finite, the sum of peaks, and the number of rows."""
    sums = [x for x in (products, lookups) if x is not None]
    parts = [part for x in sums for part in jax.tree.leaves((x.gram, x.power, x.shift))]
    finite = [jnp.all(jnp.isfinite(part)) for part in parts]
    is_finite = jnp.all(jnp.stack(finite))
    if products is None:
        return is_finite, jnp.zeros(()), jnp.zeros(())
    return is_finite, jnp.sum(products.peak), jnp.sum(products.rows)


def _require_finite(checks: dict[str, tuple], number: int, caller: str) -> None:
    if wrong := [path for path, (is_finite, *_) in checks.items() if not is_finite]:
        raise ValueError(
            f"{caller}: activations must be finite, but batch {number} has "
            f"inputs of {wrong[:5]} that are not."
        )


def _project(results: Any, key, caller: str) -> Any:
    """Return the sum of the results with random signs.

    Its gradient depends on all results, which do not cancel.
    """
    arrays = float_arrays(results)
    if not arrays:
        raise ValueError(
            f"{caller}: fn must return floating-point arrays, got {results!r}."
        )
    parts = [part for x in arrays for part in _real_parts(x)]
    total = jnp.zeros(())
    for i, array in enumerate(parts):
        signs = jax.random.rademacher(
            jax.random.fold_in(key, i), array.shape, array.dtype
        )
        total += jnp.sum(array * signs).astype(total.dtype)
    return total


def _real_parts(x: Any) -> list:
    return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
