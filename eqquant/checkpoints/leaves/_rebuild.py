"""Rebuild leaves of a tree from tensors and records. Records are checked, and never
executed."""

import dataclasses
import typing
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from beartype.door import is_bearable

from ..files import DTYPES
from ._check import check_fit, CLASSES, types_of_part
from ._formats import format_from_json, Known
from ._leaf import below, saved_fields, UNNAMED_DTYPES


_dtypes = {dtype.name: dtype for dtype in (*DTYPES.values(), *UNNAMED_DTYPES.values())}

# Exceptions that invalid records cause in code for valid records.
_record_errors = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Rebuilder:
    """Build leaves from tensors and records. `get` returns the tensor of a name: a
    `jax.ShapeDtypeStruct` to check a leaf before it is read, or a NumPy array."""

    def __init__(self, records: dict, tensors: Iterable[str], known: Known):
        self._records, self._tensors, self._known = records, set(tensors), known
        self._used: set[str] = set()  # Names of tensors and records.

    def roots(self) -> list[str]:
        """Return the paths of all leaves."""
        parts = set()
        for path, record in self._records.items():
            if cls := CLASSES.get(record["is"]):
                parts |= {below(path, f.name) for f in dataclasses.fields(cls)}
        return sorted((self._tensors | self._records.keys()) - parts)

    def build(self, path: str, get: Callable[[str], Any]) -> Any:
        try:
            return self._build(path, get)
        except _record_errors as error:
            raise ValueError(f"{path}: {error}") from error

    def check_all_used(self) -> None:
        """Raise a `ValueError` if a tensor or record belongs to no leaf."""
        if unused := (self._tensors | self._records.keys()) - self._used:
            raise ValueError(f"{sorted(unused)[:5]} do not belong to any leaf.")

    def _build(self, path: str, get: Callable[[str], Any]) -> Any:
        record = self._records.get(path)
        if record is None:
            return self._tensor(path, get)
        self._used.add(path)
        kind = record["is"]
        if path in self._tensors and kind in ("none", *CLASSES, *_to_python):
            raise ValueError("a tensor and a record have the same name.")
        if kind in CLASSES:
            return self._build_parts(path, CLASSES[kind], record, get)
        if kind == "none":
            return None
        if kind in _to_python and record.keys() == {"is", "value"}:
            return _to_python[kind](record["value"])
        if kind == "array" and record.get("dtype") in UNNAMED_DTYPES:
            return _as_dtype(self._tensor(path, get), UNNAMED_DTYPES[record["dtype"]])
        if kind == "key" and isinstance(record.get("impl"), str):
            return _as_key(self._tensor(path, get), record["impl"])
        raise ValueError(f"this version of eqquant cannot read {record!r}.")

    def _tensor(self, name: str, get: Callable[[str], Any]) -> Any:
        if name not in self._tensors:
            raise ValueError(f"the tensor {name!r} is missing.")
        self._used.add(name)
        return get(name)

    def _build_parts(self, path: str, cls: type, record: dict, get: Callable) -> Any:
        static = record.get("static")
        fields = saved_fields(cls)
        names = {f.name for f in fields if f.metadata.get("static", False)}
        if not isinstance(static, dict) or static.keys() != names:
            raise ValueError(
                f"{cls.__name__} must have the static fields {sorted(names)}."
            )
        hints = typing.get_type_hints(cls)
        node = object.__new__(cls)
        for field in fields:
            if field.name in names:
                value = self._static(static[field.name])
                ok = is_bearable(value, hints[field.name])
            else:
                value = self._build(below(path, field.name), get)
                plain = isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct)
                ok = plain or isinstance(value, types_of_part(cls, field.name))
            if not ok:
                raise ValueError(f"{field.name} cannot be {value!r}.")
            object.__setattr__(node, field.name, value)
        for field in dataclasses.fields(cls):
            if field not in fields:
                object.__setattr__(node, field.name, field.default)
        check_fit(node)
        return node

    def _static(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(self._static(x) for x in value)
        if isinstance(value, dict):
            if value.keys() == {"format"}:
                return format_from_json(value["format"], self._known)
            if value.keys() == {"dtype"} and value["dtype"] in _dtypes:
                return _dtypes[value["dtype"]]
            raise ValueError(f"static fields cannot be {value!r}.")
        return value


def _as_dtype(tensor: Any, dtype: np.dtype) -> Any:
    if tensor.dtype != np.uint8:
        raise ValueError(f"{dtype.name} must be stored as uint8, got {tensor.dtype}.")
    if isinstance(tensor, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(tensor.shape, dtype)
    return tensor.view(dtype)


def _as_key(tensor: Any, impl: str) -> Any:
    wrap = lambda data: jax.random.wrap_key_data(data, impl=impl)
    if isinstance(tensor, jax.ShapeDtypeStruct):
        return jax.eval_shape(wrap, tensor)
    return wrap(tensor if isinstance(tensor, jax.Array) else jax.device_put(tensor))


def _exactly(cls: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not cls:
            article = "an" if cls is int else "a"
            raise ValueError(f"expected {article} {cls.__name__}, got {value!r}.")
        return value

    return check


def _to_float(value: Any) -> float:
    return float.fromhex(_exactly(str)(value))


def _to_complex(value: Any) -> complex:
    real, imag = _exactly(list)(value)
    return complex(_to_float(real), _to_float(imag))


_to_python: dict[str, Callable[[Any], Any]] = {
    "bool": _exactly(bool),
    "int": _exactly(int),
    "str": _exactly(str),
    "float": _to_float,
    "complex": _to_complex,
}
