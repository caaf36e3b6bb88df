"""Reports about quantized models."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._jax import typed, wrong
from ..arrays import ImplicitArray, is_implicit, is_quantized
from ..formats import as_format, Format
from ._calibration import AbstractCalibration
from ._choice import base_of
from ._conventions import WeightAxes
from ._forward import check_forward
from ._grouped import grouped
from ._results import results_error
from ._roles import classify
from ._sites import Site, sites
from ._size import stored_bytes, too_small
from ._table import as_html, as_text


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One array of a model.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        layer = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        weight, bias = eqquant.report(eqquant.quantize_tree(layer, "nf4"), layer).rows
        assert weight.path == "weight" and weight.bits == 4.5 and weight.sqnr > 20
        assert bias.format is None and bias.reason
        ```

    **Fields:**

    - `path`, `shape`: the path and the shape of the array.
    - `format`: its format; `None` if it is not quantized.
    - `bits`: stored bits per element, including scales and padding.
    - `bytes_before`, `bytes_after`: bytes in floating point, and actual bytes.
    - `relative_error`: the Frobenius norm of the error, relative to the original;
        `None` without an original.
    - `sqnr`: the same in decibels: `-20 log10(relative_error)`.
    - `output_error`, `rounded_output_error`: the relative error of products with the
        calibration data, and the same for rounding to nearest without rotation; `None`
        without data for this weight.
    - `loss`: the expected contribution of this weight to the squared change of the
        model's results, as in [`eqquant.allocate`][]; `None` without data for this
        weight. The printed table has its share of the sum.
    - `reason`: why the array is not quantized, or why it takes unusually many bits.
    - `axes`: the axes along which blocks run or that share a scale, counted from the
        front; empty if the array is not quantized. They should be the contracted axes
        of products: the last for `w @ x`, and the first for `x @ w`.
    """

    path: str
    shape: tuple[int, ...]
    format: Format | None
    bits: float
    bytes_before: int
    bytes_after: int
    relative_error: float | None
    sqnr: float | None
    reason: str
    output_error: float | None = None
    rounded_output_error: float | None = None
    loss: float | None = None
    axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """A table, one row per array: print it, or use its `rows`.

    The printed table starts with the largest array. Arrays that differ only in numbers
    in their paths are one line, with the sum of their bytes, the smallest SQNR and the
    largest errors. So are all vectors that are not quantized for one reason. Notebooks
    show all rows as HTML, and sort them by the column that you click.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        report = eqquant.report(eqquant.quantize_tree(model, "nf4"), model)
        print(f"{report.bytes_before / report.bytes_after:.1f} times smaller")
        worst = min(row.sqnr for row in report.rows if row.format)
        assert worst > 20
        ```

    **Fields:**

    - `rows`: a [`eqquant.trees.ReportRow`][] for each array.
    - `results_error`: the relative error of the model's results; `None` if it was not
        measured.
    """

    rows: tuple[ReportRow, ...]
    results_error: float | None = None

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    @property
    def loss(self) -> float:
        return sum(row.loss or 0.0 for row in self.rows)

    def __str__(self) -> str:
        rows = grouped(self.rows)
        first, *lines = as_text([*self._table(rows), self._total()])
        rule = "-" * max(map(len, [first, *lines]))
        end = (self._caption(),) if self._caption() else ()
        return "\n".join([first, rule, *lines[:-1], rule, lines[-1], *end])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table that notebooks show. A click on a column sorts by it."""
        return as_html(self._table(self.rows), self._total(), self._caption())

    def _is_calibrated(self) -> bool:
        return any(row.output_error is not None for row in self.rows)

    def _table(self, rows: Sequence[ReportRow]) -> list[tuple[str, ...]]:
        errors = ("output error", "if rounded", "share of loss")
        names = ("path", "shape", "axis", "format", "bits", "before", "after", "SQNR")
        header = (*names, *(errors if self._is_calibrated() else ()), "")
        table: list[tuple[str, ...]] = [header]
        for row in rows:
            cells = (
                row.path,
                "x".join(map(str, row.shape)) or "scalar",
                ",".join(map(str, row.axes)),
                "-" if row.format is None else row.format.name,
                f"{row.bits:.2f}",
                f"{row.bytes_before:,}",
                f"{row.bytes_after:,}",
                "" if row.sqnr is None else f"{row.sqnr:.2f} dB",
                *(self._errors(row) if self._is_calibrated() else ()),
                row.reason,
            )
            table.append(cells)
        return table

    def _errors(self, row: ReportRow) -> tuple[str, ...]:
        if row.output_error is None or row.loss is None:
            return "", "", ""
        share = row.loss / self.loss if self.loss else 0.0
        errors = (row.output_error, row.rounded_output_error)
        return *(f"{error:.4f}" for error in errors), f"{share:.1%}"

    def _total(self) -> tuple[str, ...]:
        elements = sum(int(np.prod(row.shape)) for row in self.rows)
        bits = 8 * self.bytes_after / elements if elements else 0.0
        ratio = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        return (
            "total",
            f"{elements:,}",
            "",
            "",
            f"{bits:.2f}",
            f"{self.bytes_before:,}",
            f"{self.bytes_after:,}",
            "",
            *(("", "", "") if self._is_calibrated() else ()),
            f"{ratio:.2f}x smaller",
        )

    def _caption(self) -> str:
        error = self.results_error
        return "" if error is None else f"relative error of the results: {error:.4f}"


@typed
def report(
    model: Any,
    original: Any = None,
    *,
    calibration: AbstractCalibration | None = None,
    fn: Callable | None = None,
    batches: Iterable | None = None,
) -> Report:
    """Report the format, the size and the error of each array of a model.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        quantized = eqquant.quantize_tree(model, "nf4")
        report = eqquant.report(quantized, model)
        print(report)
        assert report.bytes_after < report.bytes_before / 6
        assert all(row.sqnr > 20 for row in report.rows if row.format)
        ```

    **Arguments:**

    - `model`: any pytree.
    - `original`: the model before quantization, to measure the error of each array.
    - `calibration`: the result of [`eqquant.calibrate`][], to also measure the errors
        of products, compare them with rounding to nearest, and estimate the share of
        each weight in the loss. Requires `original`.
    - `fn`, `batches`: also measure the error of `fn(model, batch)` against
        `fn(original, batch)` over all batches, because errors of single arrays do not
        determine the error of the model. Use data that was not used for calibration.

    **Returns:**

    A [`eqquant.trees.Report`][], to print, with `rows`.

    **Raises:**

    `ValueError` if `model` has no arrays; if `original` and `model` have different
    structures; if `calibration` or `fn` is given without `original`; if only one of
    `fn` and `batches` is given; or if there are no batches.
    """
    if calibration is not None and original is None:
        raise ValueError("report: calibration requires original, to compute errors.")
    if (fn is None) != (batches is None) or (fn is not None and original is None):
        raise ValueError(
            "report: fn requires batches and original, and batches require fn."
        )
    if fn is not None:
        check_forward(fn, model, batches, "report", "model, original, fn=, batches=")
    found = list(sites(model))
    sources: list[Any] = [None] * len(found)
    if original is not None:
        by_path = {site.path: site.leaf for site in sites(original)}
        _check_original({site.path: site.leaf for site in found}, by_path)
        sources = [by_path[site.path] for site in found]
    rows = [
        row_of(site, source, calibration)
        for site, source in zip(found, sources, strict=True)
        if is_implicit(site.leaf) or eqx.is_inexact_array(site.leaf)
    ]
    if not rows:
        accepted = "a pytree with floating-point arrays or quantized arrays"
        raise ValueError(wrong("report", "model", model, accepted))
    if fn is None or batches is None:
        return Report(tuple(rows))
    error = results_error(fn, model, original, batches, "report")
    return Report(tuple(rows), error)


def _check_original(leaves: Mapping[str, Any], sources: Mapping[str, Any]) -> None:
    """Raise an error if `sources` are not the leaves that were quantized."""
    is_any = lambda tree: any(map(is_quantized, tree.values()))
    if is_any(sources) and not is_any(leaves):
        raise ValueError(
            "report: original has quantized arrays, and model has none: they are "
            "swapped. Call `report(quantized, original)`."
        )
    differences = [
        f"{path} is in {'model' if path in leaves else 'original'} only"
        for path in [*leaves, *sources]
        if (path in leaves) != (path in sources)
    ]
    differences += [
        f"{path} has the shape {leaf.shape} in model and {sources[path].shape} in "
        "original"
        for path, leaf in leaves.items()
        if hasattr(leaf, "shape")
        and getattr(sources.get(path, leaf), "shape", leaf.shape) != leaf.shape
    ]
    if differences:
        raise ValueError(
            f"report: original must be the pytree that was quantized to model, but "
            f"{differences[0]} ({len(differences)} differences). Pass the model that "
            "`quantize_tree` was given."
        )


def row_of(
    site: Site, source: Any, calibration: AbstractCalibration | None = None
) -> ReportRow:
    """Return the row of a leaf. `source` is the original leaf, or None."""
    leaf = site.leaf
    if is_implicit(leaf):
        leaf.check_whole()
    before = int(leaf.size) * np.dtype(leaf.dtype).itemsize
    bits = 8 * leaf.nbytes / leaf.size if leaf.size else 0.0
    # A weight with an adapter: the format of the base, and the bytes of both.
    stored = base_of(leaf)
    format = stored.format if is_quantized(stored) else None
    reason = why_not(site) if format is None else _costs(bits, format)
    error = sqnr = None
    if is_implicit(leaf) and source is not None and leaf.size:
        error = _relative_error(leaf, source)
        sqnr = float("inf") if error == 0 else -20 * float(np.log10(error))
    errors = None
    if calibration is not None and format is not None:
        errors = calibration.output_errors(site.path, leaf, source)
    return ReportRow(
        site.path,
        tuple(leaf.shape),
        format,
        bits,
        before,
        int(leaf.nbytes),
        error,
        sqnr,
        reason,
        *(errors or (None, None, None)),
        axes=stored.blocked_axes if is_quantized(stored) else (),
    )


def _relative_error(q: ImplicitArray, source) -> float:
    @jax.jit
    def measure(q, source):
        values = q.dequantize().astype(jnp.float32)
        source = jnp.asarray(source).astype(jnp.float32)
        absmax = jnp.max(jnp.abs(source))
        divisor = jnp.where(absmax > 0, absmax, 1)
        # Sum over all axes, because sharded axes cannot be merged.
        norm, error = (
            jnp.sqrt(jnp.sum(jnp.square(x / divisor)))
            for x in (source, values - source)
        )
        return jnp.where(norm > 0, error / norm, jnp.where(error > 0, jnp.inf, 0))

    return float(measure(q, source))


_long_row = 2**14


def _costs(bits: float, format: Format) -> str:
    """Return a note if padding and scales dominate short rows; otherwise empty."""
    expected = 8 * stored_bytes(_long_row, format) / _long_row
    if bits < 1.4 * expected:
        return ""
    return f"short rows: padding and scales, {expected:.2f} bits in long ones"


def why_not(site) -> str:
    kind = classify(site)
    if isinstance(kind, WeightAxes):
        return too_small(site.leaf, as_format("nf4"), kind.axis) or "not selected"
    return kind
