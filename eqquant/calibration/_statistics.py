"""Statistics of the inputs of each weight."""

import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from .._jax import is_traced, warn
from ..arrays import (
    hadamard,
    is_implicit,
    MatrixAxes,
    quantize,
    QuantizedArray,
    RotatedArray,
)
from ..formats import Format
from ..trees import AbstractCalibration, base_of, Choice, Rounder
from ._correct import corrected
from ._gptq import (
    conditional_variances,
    Factors,
    gptq,
    has_nearest,
    largest_magnitude,
    row_losses,
)
from ._weighted import can_weigh, weighted


class WeightStatistics(eqx.Module):
    """Statistics of one weight.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        layer = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (128, 64))
        stats = eqquant.calibrate(lambda layer, x: jax.vmap(layer)(x), layer, [x])
        weight = stats.weights["weight"]
        assert weight.rows == 128 and weight.gram.shape == (64, 64)
        ```

    **Fields:**

    - `gram`: `(*stack, size, size)`, float32: the sum of outer products of the input
        rows of each matrix, `X^T X`, times `unit**2`. For a table, `X` contains the
        gradients with respect to the looked-up rows. For an array with lookups and
        products, it contains both: each input of a product is multiplied by the root
        mean square of the gradients with respect to the products. With
        `curvature=True`, `X` contains the gradients with respect to the rows of each
        weight, and 0.1 of the mean of the diagonal is added to the diagonal.
    - `rows`: `(*stack)`: the number of rows.
    - `power`: `(*stack)`: the sum of squared gradients with respect to the products,
        or to the rows of a table. The differentiated function is the sum of the model's
        results with random signs.
    - `shape`: the shape of the weight.
    - `axes`: the input axes, output axes and stacked axes of the weight.
    - `is_table`: whether `X` contains gradients.
    - `unit`: a power of two. It is 1 unless inputs are very small or very large.
    - `shift`: `(*stack, size, size)`, float32: the sum of `(F - X)^T X`, times
        `unit**2`, if [`eqquant.calibrate`][] had `quantized`. `X` contains the inputs
        in the quantized model, and `F` the inputs in the float model. Otherwise None,
        also for an array with lookups.
    """

    gram: Float[Array, "*stack size size"]
    rows: Float[Array, "*stack"]
    power: Float[Array, "*stack"]
    shape: tuple[int, ...] = eqx.field(static=True)
    axes: MatrixAxes = eqx.field(static=True)
    is_table: bool = eqx.field(static=True)
    unit: float = eqx.field(static=True, default=1.0)
    shift: Float[Array, "*stack size size"] | None = None

    @property
    def reached(self) -> Bool[np.ndarray, "*stack"]:
        """Which matrices of a stack had inputs other than zero."""
        squares = jnp.diagonal(self.gram, axis1=-2, axis2=-1)
        return np.asarray(jnp.any(squares != 0, -1))

    @property
    def is_reached(self) -> bool:
        return bool(np.any(self.reached))

    def gram_rotated(self, block: int) -> Float[Array, "*stack size size"]:
        return _rotated(self.gram, block)

    def corrected(
        self,
        array: Float[Array, "..."],
        factors: Callable[[], Sequence[Float[Array, "size size"]]],
        block: int,
    ) -> Float[Array, "..."]:
        """Return a rotated weight, corrected for the inputs in a quantized model.

        Without `shift`, return the weight. `factors` returns the results of
        [`inverse_factor`][] for `gram_rotated(block)`.
        """
        if self.shift is None:
            return array
        return corrected(array, _rotated(self.shift, block), factors(), self.axes)

    def output_errors(self, error: Float[Array, "..."]) -> Float[Array, " stack"]:
        """Return the sum of squared products of an array with the rows, per matrix."""
        e = self.axes.as_matrices(jnp.asarray(error).astype(jnp.float32))
        gram = self.gram.reshape(-1, *self.gram.shape[-2:])
        return jnp.sum(row_losses(e, gram), -1)

    def loss(self, squared: ArrayLike, error: Float[Array, "..."]) -> float:
        """Return the expected squared change of the results for an error.

        Squared errors of products, per matrix, are weighted by the mean squared
        gradient with respect to the products. For a table, `gram` already contains
        products of the gradients of its rows.
        """
        outputs = self.axes.as_matrices(error).shape[1]
        squared = np.asarray(squared, np.float64) / self.unit**2
        if self.is_table:
            return float(np.sum(squared) / outputs)
        rows, power = (
            np.asarray(x, np.float64).ravel() for x in (self.rows, self.power)
        )
        return float(np.sum(power / np.maximum(rows * outputs, 1) * squared))

    def expected_errors(
        self, rotation: int
    ) -> Callable[[Float[Array, "..."], bool], Float[np.ndarray, " stack"]]:
        """Return a function from an error of plain rounding to [`output_errors`][].

        The error is in a basis that is rotated with the given block. With a true second
        argument, the function returns the expected error after GPTQ.
        """
        grams = np.asarray(self.gram_rotated(rotation), np.float64)
        grams = grams.reshape(-1, *grams.shape[-2:])
        variances = np.stack([conditional_variances(gram) for gram in grams])

        def expected(error, by_gptq):
            e = np.asarray(self.axes.as_matrices(error), np.float64)
            if by_gptq:
                return np.sum(np.sum(e * e, 1) * variances, -1)
            return np.sum((e @ grams) * e, (-1, -2))

        return expected


class Statistics(AbstractCalibration):
    """The result of [`eqquant.calibrate`][], for `quantize_tree(..., calibration=...)`.

    It is a pytree, which [`eqquant.save`][] can write.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import tempfile

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (128, 64))
        stats = eqquant.calibrate(lambda model, x: jax.vmap(model)(x), model, [x])
        path = f"{tempfile.mkdtemp()}/stats.safetensors"
        eqquant.save(path, stats)
        stats = eqquant.load(path, like=stats)
        ```

    **Fields:**

    - `weights`: [`eqquant.calibration.WeightStatistics`][] by the path of the weight.
    """

    weights: dict[str, WeightStatistics]

    def check(
        self,
        leaves: Mapping[str, Any],
        choices: Sequence[Choice],
        caller: str,
        name: str = "calibration",
    ) -> None:
        """Raise an error unless these are statistics of the chosen leaves. `name` is
        the argument of the caller."""
        argument = f"{caller}: {name}"
        for path, known in self.weights.items():
            if is_traced(known.gram):
                raise TypeError(
                    f"{argument} cannot be traced: call this outside of `jit`."
                )
            if path not in leaves:
                raise ValueError(
                    f"{argument} must be statistics of this model, but it "
                    f"has {path!r}, which the model lacks."
                )
            shape = tuple(leaves[path].shape)
            if shape != known.shape:
                raise ValueError(
                    f"{argument} must be statistics of this model, but for "
                    f"{path!r} it has the shape {known.shape}, and the model {shape}."
                )
            for name, sums in (("Gram matrix", known.gram), ("shift", known.shift)):
                if sums is None or bool(jnp.all(jnp.isfinite(sums))):
                    continue
                raise ValueError(
                    f"{argument} must be finite, but the {name} of "
                    f"{path!r} is not. Calibrate again."
                )
            asymmetry = jnp.max(jnp.abs(known.gram - jnp.swapaxes(known.gram, -2, -1)))
            if asymmetry > 1e-3 * jnp.max(jnp.abs(known.gram)):
                raise ValueError(
                    f"{argument} must have symmetric Gram matrices, but "
                    f"that of {path!r} differs from its transpose by up to "
                    f"{float(asymmetry):.3g}. Calibrate again."
                )
        plain = [c for c in choices if not self._serves(c, leaves[c.path].ndim)]
        unknown = [c.path for c in plain if not c.is_table]
        if unknown:
            warn(
                f"{caller}: there is no calibration for {unknown}: the data did not "
                "reach them, or other axes were calibrated. They are rounded plainly, "
                "to the nearest level.",
                UserWarning,
            )

        formats = {repr(c.format) for c in choices if not _uses_data(c.format)}
        if formats:
            warn(
                f"{caller}: {', '.join(sorted(formats))} cannot use the data: GPTQ "
                "needs `nearest` and no offsets. Its weights are rounded plainly, to "
                "the nearest level. With offsets that are floats, `fit='search'` "
                "uses the data.",
                UserWarning,
            )

    def _serves(self, choice: Choice, ndim: int) -> bool:
        known = self.weights.get(choice.path)
        if known is None or not known.is_reached:
            return False
        return matrix_axes_of(choice, ndim) == known.axes

    def rounder(self, search: int) -> Rounder:
        factors = Factors()

        def rounded(array, choice: Choice, rotation: int, check_finite: bool):
            if not self._serves(choice, array.ndim) or not _uses_data(choice.format):
                return None
            known = self.weights[choice.path]
            gram = known.gram_rotated(rotation)
            own = ft.partial(factors, known.gram, rotation, gram)
            array = known.corrected(array, own, rotation)
            plain = quantize(
                array, choice.format, axis=choice.axis, check_finite=check_finite
            )
            if not has_nearest(choice.format):
                return weighted(array, plain, gram, known.axes)
            return gptq(array, plain, gram, own(), known.axes, search)

        return rounded

    def output_errors(
        self, path: str, array: Any, source: Any
    ) -> tuple[float, float, float] | None:
        known = self.weights.get(path)
        q, source = base_of(array), base_of(source)
        if known is None or not known.is_reached or is_implicit(source):
            return None
        stored = q.base if isinstance(q, RotatedArray) else q
        source = jnp.asarray(source)
        if not isinstance(stored, QuantizedArray) or stored.shape != source.shape:
            return None
        plain = quantize(source, stored.format, axis=stored.axes, check_finite=False)
        largest = largest_magnitude(source)
        squared = lambda x: max(float(jnp.sum(known.output_errors(x / largest))), 0.0)
        norm = squared(source)
        relative = lambda x: math.sqrt(squared(x) / norm) if norm else 0.0
        error = q.dequantize() - source
        errors = np.asarray(known.output_errors(error / largest), np.float64)
        loss = known.loss(errors * float(largest) ** 2, error)
        return relative(error), relative(plain.dequantize() - source), loss


def _rotated(
    matrices: Float[Array, "*stack size size"], block: int
) -> Float[Array, "*stack size size"]:
    """Rotate both axes of matrices by blocks of `block` values."""
    if block == 1:
        return matrices
    return hadamard(hadamard(matrices, -1, block), -2, block)


def _uses_data(format: Format) -> bool:
    return has_nearest(format) or can_weigh(format)


def matrix_axes_of(choice: Choice, ndim: int) -> MatrixAxes:
    """Return the axes of a weight.

    If its layer declares no output axis, this is the last axis that is not contracted.
    In a table, all axes that are not contracted are outputs.
    """
    if choice.out is not None or choice.is_table:
        return MatrixAxes.of(ndim, choice.axis, choice.out)
    axes = MatrixAxes.of(ndim, choice.axis)
    return MatrixAxes(axes.inputs, axes.outputs[-1:], axes.outputs[:-1])
