"""The interface of what is known of a model's data. The room above implements it."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx

from ..arrays import QuantizedArray
from ._choice import Choice


class AbstractCalibration(eqx.Module):
    """What [`eqquant.quantize_tree`][] and [`eqquant.report`][] ask of statistics."""

    @abc.abstractmethod
    def check(
        self, leaves: Mapping[str, Any], choices: Sequence[Choice], caller: str
    ) -> None:
        """An error if this is of another model; a warning of what was not reached."""

    @abc.abstractmethod
    def quantize(
        self, array: Any, choice: Choice, rotation: int, check_finite: bool
    ) -> QuantizedArray | None:
        """GPTQ of an array that is rotated in blocks of that size. None if nothing is
        known of it."""

    @abc.abstractmethod
    def output_errors(
        self, path: str, array: Any, source: Any
    ) -> tuple[float, float] | None:
        """The relative error of products with the data: that of a quantized array, and
        that of its format by plain rounding. None if nothing is known of it."""
