"""The cost of each format for a weight: bytes and expected loss."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..arrays import MatrixAxes, quantize, rotated
from ..formats import Format
from ..trees import base_of, Choice, nbytes
from ._gptq import has_nearest
from ._statistics import matrix_axes_of, Statistics


# The number of outputs of a weight, or rows of a table, for the estimate of the error.
_outputs = 512


@dataclasses.dataclass(frozen=True)
class Option:
    """A candidate format for a weight, with its bytes and its expected loss."""

    format: Format
    nbytes: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Options:
    """The candidates of one weight on the lower convex hull of loss against bytes, the
    smallest first."""

    path: str
    size: int
    axis: int | tuple[int, ...]
    hull: tuple[Option, ...]


def gain(less: Option, more: Option) -> float:
    return (less.loss - more.loss) / (more.nbytes - less.nbytes)


def options_of(
    leaf: Any,
    choice: Choice,
    formats: Sequence[Format],
    stats: Statistics,
    by_gptq: bool,
    rotate: bool | int,
) -> Options:
    array = jnp.asarray(base_of(leaf))
    axes = matrix_axes_of(choice, array.ndim)
    sample, block = _some_outputs(array, axes), 1
    if rotate:
        sample, block = rotated(sample, axes.inputs[-1], rotate)
    known = stats.weights.get(choice.path)
    loss_of = lambda error, by_gptq: 0.0
    if known is not None and known.is_reached and known.axes == axes:
        squared = known.expected_errors(block)
        loss_of = lambda error, by_gptq: known.loss(squared(error, by_gptq), error)
    found = []
    for format in formats:
        rounded = ft.partial(quantize, format=format, axis=choice.axis)
        whole = jax.eval_shape(ft.partial(rounded, check_finite=False), array)
        error = rounded(sample).dequantize().astype(jnp.float32) - sample
        loss = loss_of(error, by_gptq and has_nearest(format))
        found.append(Option(format, nbytes(whole), loss))
    found.sort(key=lambda option: (option.nbytes, option.loss))
    hull: list[Option] = []
    for option in found:
        if hull and (option.nbytes == hull[-1].nbytes or option.loss >= hull[-1].loss):
            continue
        while len(hull) > 1 and gain(hull[-2], hull[-1]) <= gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return Options(choice.path, array.size, choice.axis, tuple(hull))


def _some_outputs(array: Float[Array, "..."], axes: MatrixAxes) -> Float[Array, "..."]:
    """Return evenly spaced outputs, if there are more than needed."""
    if not axes.outputs or array.shape[axes.outputs[0]] <= _outputs:
        return array
    last = array.shape[axes.outputs[0]] - 1
    indices = np.linspace(0, last, _outputs).round().astype(np.int32)
    return jnp.take(array, indices, axis=axes.outputs[0])
