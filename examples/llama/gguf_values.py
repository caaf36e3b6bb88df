"""Checked access to the metadata of a GGUF file. Errors name the key."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Values:
    """The key-value pairs whose keys start with `prefix`.

    The methods take a key without the prefix. A missing key has the default, and raises
    a `ValueError` without one. `check_all_used` raises for keys that no method read.
    """

    def __init__(self, where: pathlib.Path, metadata: Mapping[str, Any], prefix: str):
        self.where, self.prefix = where, prefix
        self._metadata = metadata
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._metadata

    def fail(self, name: str, problem: str):
        raise ValueError(f"{self.where}: {self.prefix}{name} {problem}")

    def _get(self, name: str, default: Any, is_valid, expected: str) -> Any:
        self._used.add(self.prefix + name)
        value = self._metadata.get(self.prefix + name)
        if value is None:
            if default is ...:
                self.fail(name, f"is missing; expected {expected}.")
            return default
        if not is_valid(value):
            self.fail(name, f"must be {expected}, got {value!r:.80}.")
        return value

    def integer(self, name: str, default: Any = ..., *, least: int = 1) -> Any:
        """Return an integer. An array with an equal number per layer is also valid."""
        value = self._metadata.get(self.prefix + name)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            self._used.add(self.prefix + name)
            value = value[0].item()
            if type(value) is int and value >= least:
                return value
        is_valid = lambda x: type(x) is int and x >= least
        return self._get(name, default, is_valid, f"an integer of at least {least}")

    def number(self, name: str, default: Any = ...) -> Any:
        is_valid = lambda x: type(x) in (int, float) and 0 < x < float("inf")
        return self._get(name, default, is_valid, "a positive number")

    def flag(self, name: str, default: bool) -> bool:
        return self._get(name, default, lambda x: type(x) is bool, "a bool")

    def text(self, name: str, default: Any = ...) -> Any:
        return self._get(name, default, lambda x: type(x) is str, "a string")

    def texts(self, name: str) -> list[str]:
        is_valid = lambda x: type(x) is list and all(type(one) is str for one in x)
        return self._get(name, ..., is_valid, "an array of strings")

    def numbers(self, name: str, count: int, default: Any = ...) -> Any:
        """Return an array of `count` numbers."""
        is_valid = lambda x: isinstance(x, np.ndarray) and len(x) == count
        return self._get(name, default, is_valid, f"an array of {count} numbers")

    def flags(self, name: str, count: int) -> tuple[bool, ...] | None:
        """Return an array of `count` bools; `None` if the value is not an array."""
        value = self._metadata.get(self.prefix + name)
        if not isinstance(value, list):
            return None
        is_valid = lambda x: len(x) == count and all(type(one) is bool for one in x)
        return tuple(self._get(name, ..., is_valid, f"an array of {count} bools"))

    def must_be(self, name: str, *allowed: Any) -> None:
        """Check that a value is one of `allowed`, if there is one."""
        expected = " or ".join(map(repr, allowed))
        self._get(name, None, lambda x: x in allowed, f"{expected} for this decoder")

    def ignore(self, names: Sequence[str]) -> None:
        """Ignore keys that have no effect on the logits."""
        self._used |= {self.prefix + name for name in names}

    def check_all_used(self) -> None:
        for key in self._metadata:
            if key.startswith(self.prefix) and key not in self._used:
                self.fail(
                    key.removeprefix(self.prefix), "is not supported by this decoder."
                )
