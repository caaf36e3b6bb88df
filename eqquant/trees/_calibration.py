"""The interface of calibration statistics, which `calibration/` implements."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx

from ..arrays import QuantizedArray
from ._choice import Choice


# `rounder(array, choice, rotation, check_finite)`.
Rounder = Callable[[Any, Choice, int, bool], QuantizedArray | None]


class AbstractCalibration(eqx.Module):
    """The statistics that [`eqquant.quantize_tree`][] and [`eqquant.report`][] use."""

    _accepted_as: ClassVar[str] = "the result of `eqquant.calibrate`"

    @abc.abstractmethod
    def check(
        self, leaves: Mapping[str, Any], choices: Sequence[Choice], caller: str
    ) -> None:
        """Raise an error for another model, and warn about weights without data."""

    @abc.abstractmethod
    def rounder(self, search: int) -> Rounder:
        """Return a function that quantizes a rotated array by GPTQ, or returns None
        without statistics for it. `search` is as in [`eqquant.quantize_tree`][].

        Call the function for the weights of a model in their order: it keeps the last
        factorisation, because neighbours often share inputs.
        """

    @abc.abstractmethod
    def output_errors(
        self, path: str, array: Any, source: Any
    ) -> tuple[float, float, float] | None:
        """Return the relative error of products with the data, for a quantized array
        and for rounding to nearest, and the expected squared change of the results.
        Return None without statistics for it."""
