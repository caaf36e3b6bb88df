"""A byte budget for a whole model, shared out among its weights."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import typed
from ..arrays import LoraArray, quantize
from ..formats import as_format, Format
from ..trees import Choice, choose, sites, tree_nbytes
from ._layout import Layout
from ._statistics import Statistics, WeightStatistics


_caller = "allocate"


@dataclasses.dataclass(frozen=True)
class AllocationRow:
    """What one weight gets.

    **Fields:**

    - `path`, `size`: of the weight.
    - `format`: the format that it gets.
    - `axis`: the axis along which it is quantized.
    - `nbytes`: what it takes in that format.
    - `loss`: how much of the squared change of the results of the model is expected to
        come from this weight; for comparison with the other rows.
    """

    path: str
    size: int
    format: Format
    axis: int | tuple[int, ...]
    nbytes: int
    loss: float


@dataclasses.dataclass(frozen=True, repr=False)
class Allocation(Mapping):
    """The rules that [`eqquant.allocate`][] returns: a mapping of paths to pairs of a
    format and an axis, for `rules` of [`eqquant.quantize_tree`][]. Print it for a
    table, or use its fields.

    **Fields:**

    - `rows`: an `AllocationRow` for each weight, the one with the largest loss first.
    - `nbytes`: what the whole model will take.
    - `budget`: what it may take.
    """

    rows: tuple[AllocationRow, ...]
    nbytes: int
    budget: int

    def __getitem__(self, path: str) -> tuple[Format, Any]:
        for row in self.rows:
            if row.path == path:
                return row.format, row.axis
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        return (row.path for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        total = sum(row.loss for row in self.rows) or 1.0
        table = [("path", "format", "bits", "bytes", "share of loss")]
        for row in self.rows:
            bits = 8 * row.nbytes / row.size
            share = f"{row.loss / total:.1%}"
            name = repr(row.format)
            table.append((row.path, name, f"{bits:.2f}", f"{row.nbytes:,}", share))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in table
        ]
        end = f"the whole model: {self.nbytes:,} bytes, of {self.budget:,}"
        return "\n".join([*lines, end])

    __repr__ = __str__


@typed
def allocate(
    model: Any,
    budget: int,
    formats: Sequence[Format | str],
    stats: Statistics,
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
) -> Allocation:
    """Choose a format for each weight, such that the whole model fits in a number of
    bytes and its results change as little as possible.

    What a format costs a weight is the error of the products with the calibration data
    by plain rounding, times the mean squared gradient of the results with respect to
    these products. The first steps are those with the largest gain per byte. The
    assignment is that of a Lagrange multiplier, as the lower convex hull of each
    weight has its formats in order of gain; what is left of the budget then goes to
    steps that still fit.

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
        assert eqquant.tree_nbytes(quantized) == rules.nbytes <= 65_000
        ```

    **Arguments:**

    - `model`: any pytree, not quantized yet.
    - `budget`: how many bytes all of its arrays may take, biases and norms included.
    - `formats`: what there is to choose from: formats, or their names.
    - `stats`: what [`eqquant.calibrate`][] has seen of this model.
    - `where`, `rules`, `min_size`: the weights to choose for, as in
        [`eqquant.quantize_tree`][]. Of a rule only the axis counts, and whether it
        leaves an array alone.

    **Returns:**

    An [`eqquant.Allocation`][]. The same arguments give the same one.

    A weight that the data never reached gets the smallest format.

    **Raises:**

    `ValueError` if there are no formats, if the smallest ones take more than the
    budget, if no weight is chosen, or if `stats` are of another model.
    """
    choices_of = [as_format(format) for format in formats]
    if not choices_of:
        raise ValueError(f"{_caller}: formats must hold at least one format, got none.")
    choices = choose(
        model, "nf4", where=where, rules=rules, min_size=min_size, caller=_caller
    )
    if not choices:
        raise ValueError(f"{_caller}: no weight is chosen. See where and rules.")
    leaves = {site.path: site.leaf for site in sites(model)}
    stats.check(leaves, choices, _caller)

    before = sum(tree_nbytes(_base(leaves[choice.path])) for choice in choices)
    others = tree_nbytes(model) - before
    options = [_options(leaves[c.path], c, choices_of, stats) for c in choices]
    taken = [0] * len(choices)
    nbytes = others + sum(hull[0].nbytes for hull in options)
    if nbytes > budget:
        raise ValueError(
            f"{_caller}: budget must be at least {nbytes:,} bytes, which the model "
            f"takes in the smallest of formats, got {budget:,}. {others:,} of them are "
            "of arrays that are not quantized."
        )
    # The steps of all hulls, the steepest first; equal ones in order of the model.
    steps = sorted(
        (-_gain(hull[i], hull[i + 1]), weight, i)
        for weight, hull in enumerate(options)
        for i in range(len(hull) - 1)
    )
    for _, weight, i in steps:
        hull = options[weight]
        more = hull[i + 1].nbytes - hull[taken[weight]].nbytes
        if taken[weight] == i and nbytes + more <= budget:
            taken[weight] = i + 1
            nbytes += more
    rows = [
        AllocationRow(
            choice.path,
            leaves[choice.path].size,
            hull[at].format,
            choice.axis,
            hull[at].nbytes,
            hull[at].loss,
        )
        for choice, hull, at in zip(choices, options, taken, strict=True)
    ]
    rows.sort(key=lambda row: -row.loss)
    return Allocation(tuple(rows), nbytes, budget)


@dataclasses.dataclass(frozen=True)
class _Option:
    format: Format
    nbytes: int
    loss: float


def _base(leaf: Any) -> Any:
    return leaf.base if isinstance(leaf, LoraArray) else leaf


def _gain(less: _Option, more: _Option) -> float:
    return (less.loss - more.loss) / (more.nbytes - less.nbytes)


def _options(
    leaf: Any, choice: Choice, formats: Sequence[Format], stats: Statistics
) -> list[_Option]:
    """The formats on the lower convex hull of loss over bytes, the smallest first."""
    array = jnp.asarray(_base(leaf))
    known = stats.weights.get(choice.path)
    layout = Layout.of(choice.axis, choice.out, choice.is_table, array.ndim)
    if known is None or not known.is_reached or known.layout != layout:
        known = None
    options = []
    for format in formats:
        q = quantize(array, format, axis=choice.axis)
        error = q.dequantize().astype(jnp.float32) - array.astype(jnp.float32)
        loss = 0.0 if known is None else _loss(known, error)
        options.append(_Option(format, q.nbytes, loss))
    options.sort(key=lambda option: (option.nbytes, option.loss))
    hull: list[_Option] = []
    for option in options:
        if hull and (option.nbytes == hull[-1].nbytes or option.loss >= hull[-1].loss):
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _loss(known: WeightStatistics, error: Any) -> float:
    """The expected squared change of the results. Errors of products count with the
    mean squared gradient with respect to these; rows of a table have gradients of
    their own, the products of which are what `gram` holds."""
    rows = np.asarray(known.rows, np.float64).reshape(-1)
    errors = np.asarray(_errors(known, error), np.float64)
    outputs = known.layout.as_matrices(error).shape[1]
    if known.is_table:
        return float(np.sum(errors) / outputs)
    power = np.asarray(known.power, np.float64).reshape(-1)
    mean = power / np.maximum(rows * outputs, 1)
    return float(np.sum(mean * errors))


@jax.jit
def _errors(known: WeightStatistics, error: Any):
    """The squared error of the products of each matrix of a stack."""
    return known.output_errors(error)
