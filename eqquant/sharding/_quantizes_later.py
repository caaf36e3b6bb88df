"""Modules that quantize their arrays in each call."""

import abc
from typing import Any, TypeVar

import equinox as eqx


Self = TypeVar("Self", bound="QuantizesLater")


class QuantizesLater(eqx.Module):
    """A module that quantizes its arrays later.

    It stores the sharding of each array, and applies it to the quantized arrays.
    """

    @abc.abstractmethod
    def with_splits(self: Self, splits: Any) -> Self:
        """Return the module with a sharding for each array.

        `splits` is a tree of the same structure with a [`Split`][] for each array.
        Raises `ValueError` if a sharding does not fit.
        """
