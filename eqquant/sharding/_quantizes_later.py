"""Modules that quantize their arrays each time they are called."""

import abc
from typing import Any, TypeVar

import equinox as eqx


Self = TypeVar("Self", bound="QuantizesLater")


class QuantizesLater(eqx.Module):
    """A module whose arrays are not quantized yet: it remembers how each is split, and
    splits what it makes of them."""

    @abc.abstractmethod
    def with_splits(self: Self, splits: Any) -> Self:
        """The same, told of the split of each of its arrays: a tree of its structure
        with a [`Split`][] for each. Raises `ValueError` for one that will not fit."""
