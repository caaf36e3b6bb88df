"""Allocation of a byte budget to the weights of a model."""

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from .._jax import check_one_of, typed, wrong
from ..formats import as_format, Format
from ..trees import (
    as_text,
    base_of,
    check_rotations,
    choose,
    Method,
    nbytes,
    rotation_of,
    Rotations,
    sites,
)
from ._options import gain, Option, Options, options_of
from ._statistics import Statistics


_caller = "allocate"


@dataclasses.dataclass(frozen=True)
class AllocationRow:
    """The format of one weight.

    **Fields:**

    - `path`, `size`: the path and the number of elements of the weight.
    - `format`: the allocated format.
    - `axis`: the axis along which the weight is quantized.
    - `nbytes`: the bytes of the weight in that format.
    - `loss`: the expected contribution of this weight to the squared change of the
        model's results; compare it with other rows.
    """

    path: str
    size: int
    format: Format
    axis: int | tuple[int, ...]
    nbytes: int
    loss: float


@dataclasses.dataclass(frozen=True, repr=False)
class Allocation(Mapping):
    """The result of [`eqquant.allocate`][]: a mapping from paths to (format, axis), for
    `rules` of [`eqquant.quantize_tree`][]. Print it to get a table.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (128, 64))
        stats = eqquant.calibrate(lambda model, x: jax.vmap(model)(x), model, [x])
        rules = eqquant.allocate(model, 65_000, ["nf4", "int8"], stats)
        assert rules.nbytes <= rules.budget == 65_000
        assert rules.rows[0].loss >= rules.rows[-1].loss
        smaller = rules.within(60_000)  # Reads no data.
        ```

    **Fields:**

    - `rows`: an `AllocationRow` for each weight, the one with the largest loss first.
    - `nbytes`: the bytes of the whole quantized model.
    - `budget`: the byte budget.
    """

    rows: tuple[AllocationRow, ...]
    nbytes: int
    budget: int
    _options: tuple[Options, ...]
    _others: int

    def __getitem__(self, path: str) -> tuple[Format, Any]:
        for row in self.rows:
            if row.path == path:
                return row.format, row.axis
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        return (row.path for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def within(self, budget: int | float) -> "Allocation":
        """Return the allocation for another budget, without new measurements."""
        return _chosen(self._options, self._others, _whole_bytes(budget))

    @property
    def frontier(self) -> list[tuple[int, float]]:
        """Return (bytes, expected loss) of the whole model for the best assignments,
        from the smallest to the largest."""
        hulls = [options.hull for options in self._options]
        nbytes = self._others + sum(hull[0].nbytes for hull in hulls)
        points = [(nbytes, sum(hull[0].loss for hull in hulls))]
        for weight, i in _steps(hulls):
            less, more = hulls[weight][i : i + 2]
            nbytes, loss = points[-1]
            nbytes += more.nbytes - less.nbytes
            points.append((nbytes, loss + more.loss - less.loss))
        return points

    @property
    def loss(self) -> float:
        """The expected squared change of the model's results."""
        return sum(row.loss for row in self.rows)

    def plot(self, axes: Any = None) -> Any:
        """Plot the expected loss against bytes for every budget, and mark the chosen
        assignment. Requires matplotlib, from the extra `examples`. Returns the axes."""
        import matplotlib.pyplot as plt  # An optional dependency.

        if axes is None:
            axes = plt.subplots(layout="constrained")[1]
        nbytes, losses = zip(*self.frontier, strict=True)
        megabytes = np.asarray(nbytes) / 1e6
        axes.plot(megabytes, losses, drawstyle="steps-post", label="best assignments")
        axes.axvline(self.budget / 1e6, color="grey", ls=":", label="budget")
        axes.plot(self.nbytes / 1e6, self.loss, "o", label="chosen")
        axes.set(xlabel="MB", ylabel="expected loss", yscale="log")
        axes.legend()
        return axes

    def __str__(self) -> str:
        total = self.loss or 1.0
        table = [("path", "format", "bits", "bytes", "share of loss")]
        for row in self.rows:
            bits = 8 * row.nbytes / row.size
            share = f"{row.loss / total:.1%}"
            name = repr(row.format)
            table.append((row.path, name, f"{bits:.2f}", f"{row.nbytes:,}", share))
        end = f"the whole model: {self.nbytes:,} bytes, of {self.budget:,}"
        return "\n".join([*as_text(table), end])

    __repr__ = __str__


@typed
def allocate(
    model: Any,
    budget: int | float,
    formats: Sequence[Format | str],
    stats: Statistics,
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
    method: str = "gptq",
    rotate: Rotations = False,
) -> Allocation:
    """Choose a format for each weight within a byte budget, with the least change of
    the model's results.

    The loss of a format is the expected error of the products with the calibration
    data, times the mean squared gradient of the results with respect to these products,
    for at most 512 outputs. The error after GPTQ is estimated without running it: GPTQ
    leaves the share of each input's rounding error that later inputs do not explain.
    Each weight starts with its smallest format. Steps along its lower convex hull are
    taken in order of gain per byte, which solves the Lagrangian relaxation. The
    remaining budget goes to steps that still fit. Finally, one large step may replace
    several small steps.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (128, 64))
        stats = eqquant.calibrate(lambda model, x: jax.vmap(model)(x), model, [x])
        rules = eqquant.allocate(model, 65_000, ["ternary", "nf4", "int8"], stats)
        print(rules)
        quantized = eqquant.quantize_tree(model, rules=rules, calibration=stats)
        assert eqquant.trees.nbytes(quantized) == rules.nbytes <= 65_000
        ```

    **Arguments:**

    - `model`: any pytree that is not quantized yet.
    - `budget`: the bytes for all arrays, including biases and norms, such as `1.5e9`.
    - `formats`: the candidate formats, or their names.
    - `stats`: the result of [`eqquant.calibrate`][] for this model.
    - `where`, `rules`, `min_size`: the weights to allocate, as in
        [`eqquant.quantize_tree`][]. A rule only determines the axis, or excludes an
        array.
    - `method`, `rotate`: the rounding, as in [`eqquant.quantize_tree`][]. Pass the same
        values to both functions.

    **Returns:**

    An [`eqquant.calibration.Allocation`][]. The result is deterministic. Its method
    `within` is fast for other budgets.

    A weight without calibration data gets the smallest format.

    **Raises:**

    `ValueError` if there are no formats, if the smallest formats exceed the budget, if
    no weight is chosen, if `method` is unknown, or if `stats` belong to another model.
    """
    check_one_of(_caller, "method", method, get_args(Method))
    check_rotations(_caller, rotate)
    budget = _whole_bytes(budget)
    if isinstance(formats, str):
        accepted = "a sequence of formats"
        raise TypeError(
            wrong(_caller, "formats", formats, accepted, f"Pass [{formats!r}].")
        )
    known = [as_format(format, _caller) for format in formats]
    if not known:
        raise ValueError(f"{_caller}: formats must hold at least one format, got none.")
    choices = choose(
        model, "nf4", where=where, rules=rules, min_size=min_size, caller=_caller
    )
    if not choices:
        raise ValueError(f"{_caller}: no weight is chosen. See where and rules.")
    leaves = {site.path: site.leaf for site in sites(model)}
    stats.check(leaves, choices, _caller, "stats")
    if any(np.any(np.isnan(known.power)) for known in stats.weights.values()):
        raise ValueError(
            f"{_caller}: stats must contain gradients, but `calibrate` ran with "
            "gradients_every=None. Pass an integer."
        )

    before = sum(nbytes(base_of(leaves[choice.path])) for choice in choices)
    others = nbytes(model) - before
    by_gptq = method == "gptq"
    options = tuple(
        options_of(
            leaves[choice.path],
            choice,
            known,
            stats,
            by_gptq,
            rotation_of(choice.path, rotate),
        )
        for choice in choices
    )
    return _chosen(options, others, budget)


def _chosen(options: tuple[Options, ...], others: int, budget: int) -> Allocation:
    hulls = [weight.hull for weight in options]
    taken = [0] * len(hulls)
    nbytes = others + sum(hull[0].nbytes for hull in hulls)
    if nbytes > budget:
        raise ValueError(
            f"{_caller}: budget must be at least {nbytes:,} bytes, which the model "
            f"takes in the smallest of formats, got {budget:,}. {others:,} of them are "
            "of arrays that are not quantized."
        )
    steps = _steps(hulls)
    taken, nbytes = _filled(hulls, steps, taken, nbytes, budget)
    taken, nbytes = _exchanged(hulls, steps, taken, nbytes, budget)
    rows = []
    for weight, index in zip(options, taken, strict=True):
        best = weight.hull[index]
        row = AllocationRow(
            weight.path, weight.size, best.format, weight.axis, best.nbytes, best.loss
        )
        rows.append(row)
    rows.sort(key=lambda row: -row.loss)
    return Allocation(tuple(rows), nbytes, budget, options, others)


def _whole_bytes(budget: Any) -> int:
    if isinstance(budget, bool) or budget % 1 != 0:
        raise ValueError(wrong(_caller, "budget", budget, "a whole number of bytes"))
    return int(budget)


_Steps = Sequence[tuple[int, int]]


def _filled(
    hulls: Sequence[tuple[Option, ...]],
    steps: _Steps,
    taken: Sequence[int],
    nbytes: int,
    budget: int,
) -> tuple[list[int], int]:
    """Take every step that still fits, the steepest first."""
    taken = list(taken)
    for weight, i in steps:
        more = hulls[weight][i + 1].nbytes - hulls[weight][i].nbytes
        if taken[weight] == i and nbytes + more <= budget:
            taken[weight] = i + 1
            nbytes += more
    return taken, nbytes


def _exchanged(
    hulls: Sequence[tuple[Option, ...]],
    steps: _Steps,
    taken: list[int],
    nbytes: int,
    budget: int,
) -> tuple[list[int], int]:
    """Replace small steps by one large step if that reduces the loss.

    For example, a table can be half of the model, so that its step did not fit.
    """

    def loss_of(taken):
        return sum(hull[i].loss for hull, i in zip(hulls, taken, strict=True))

    def last_steps(taken):
        return [last_step(taken, weight) for weight, i in enumerate(taken) if i]

    def last_step(taken, weight):
        less, more = hulls[weight][taken[weight] - 1 : taken[weight] + 1]
        return gain(less, more), weight, more.nbytes - less.nbytes

    smallest = sorted(last_steps(taken))
    for large, i in steps:
        less, more = hulls[large][i : i + 2]
        missing = more.nbytes - less.nbytes - (budget - nbytes)
        # Every removed step has at least the smallest gain.
        if (
            taken[large] != i
            or not smallest
            or less.loss - more.loss <= missing * smallest[0][0]
        ):
            continue
        new, size = list(taken), nbytes + more.nbytes - less.nbytes
        new[large] = i + 1
        # A sorted list is a heap.
        heap = [step for step in smallest if step[1] != large]
        while size > budget and heap:
            _, weight, freed = heapq.heappop(heap)
            new[weight] -= 1
            size -= freed
            if new[weight]:
                heapq.heappush(heap, last_step(new, weight))
        if size > budget:
            continue
        new, size = _filled(hulls, steps, new, size, budget)
        if loss_of(new) < loss_of(taken):
            taken, nbytes, smallest = new, size, sorted(last_steps(new))
    return taken, nbytes


def _steps(hulls: Sequence[tuple[Option, ...]]) -> list[tuple[int, int]]:
    """Return the steps of all weights, the steepest first; ties in order of the
    model."""
    steps = sorted(
        (-gain(hull[i], hull[i + 1]), weight, i)
        for weight, hull in enumerate(hulls)
        for i in range(len(hull) - 1)
    )
    return [(weight, i) for _, weight, i in steps]
