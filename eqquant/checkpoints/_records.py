"""Leaves of a tree as tensors, and records of what is more than a tensor; and back.

A record says what `is` at its path: an array of eqquant's, whose parts are below that
path; a number or a string of Python; a random key; or an array of a dtype that
safetensors has no name for. Records are data. What they name is looked up in a table.
"""

import dataclasses
import functools as ft
import math
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from beartype.door import is_bearable

from .._jax import is_traced
from ..arrays import is_implicit, QuantizedArray, without_plan
from ..formats import Format
from ._check import check_codes, check_fit, CLASSES, PARTS
from ._formats import format_from_json, format_to_json, Known
from ._layout import Piece
from ._memory import to_numpy
from ._processes import Alone, Share
from ._safetensors import DTYPES


# Each takes a byte.
_unnamed = ("float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4")
_unnamed_dtypes = {name: np.dtype(getattr(jnp, name)) for name in _unnamed}
_dtypes = {dtype.name: dtype for dtype in (*DTYPES.values(), *_unnamed_dtypes.values())}


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor to be: its name, how to make it, and which process does. It may be a
    piece of a larger one."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    owner: int = 0
    piece: Piece | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> tuple[str, jax.ShapeDtypeStruct]:
        """The tensor that this is, or is a piece of: its name, and what it is like."""
        if self.piece is None:
            return self.name, jax.ShapeDtypeStruct(self.shape, self.dtype)
        return self.piece.of, jax.ShapeDtypeStruct(self.piece.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a tree, as it goes into a file."""

    path: str
    records: dict[str, dict[str, Any]]
    parts: tuple[Part, ...]

    def of(self, owner: int) -> "Leaf":
        """What one process writes of it. Records are those of the first."""
        parts = tuple(part for part in self.parts if part.owner == owner)
        return Leaf(self.path, {} if owner else self.records, parts)


def below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


#
# To records
#


def describe(path: str, leaf: Any, processes: Alone) -> Leaf | None:
    """None for what is no data."""
    parts = jax.tree.leaves(leaf)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in parts):
        raise TypeError("a jax.ShapeDtypeStruct cannot be saved: it has no values.")
    if any(is_traced(x) for x in parts):
        raise TypeError("what JAX traces cannot be saved: call this outside of `jit`.")
    if is_no_data(leaf):
        return None
    records: dict[str, dict[str, Any]] = {}
    parts = tuple(_describe(path, leaf, records, processes))
    if is_implicit(leaf):
        _check_comes_back(path, leaf, records, parts)
    return Leaf(path, records, parts)


def _check_comes_back(path: str, leaf: Any, records: dict, parts: Iterable) -> None:
    """What cannot be loaded must not be saved."""
    is_quantized = lambda x: isinstance(x, QuantizedArray)
    arrays = filter(is_quantized, jax.tree.leaves(leaf, is_leaf=is_quantized))
    known = {q.format.name: type(q.format) for q in arrays}
    described = dict(part.whole for part in parts)
    rebuilt = Rebuilder(records, described, known).build(path, described.__getitem__)
    if jax.tree.structure(rebuilt) != jax.tree.structure(without_plan(leaf)):
        raise ValueError(f"{leaf!r} would not come back as it is.")


def is_no_data(leaf: Any) -> bool:
    """Functions are code; and `eqx.nn.Shared` leaves a mark where it took an array
    away."""
    is_mark = type(leaf).__qualname__ == "SharedNode"
    is_array = is_implicit(leaf) or hasattr(leaf, "dtype")
    return is_mark or (callable(leaf) and not is_array)


def describe_later(path: str, leaf: Any, make: Callable[[], Any]) -> Leaf:
    """The same of a leaf that is only described, and that `make` will make: when the
    first part of it is asked for. It is forgotten after the last one."""
    made: list[Any] = []

    def part(i: int) -> np.ndarray:
        if not made:
            made.extend(jax.tree.leaves(make()))
        out, made[i] = to_numpy(made[i]), None
        if all(x is None for x in made):
            made.clear()
        return out

    records: dict[str, dict[str, Any]] = {}
    parts = [
        dataclasses.replace(p, make=ft.partial(part, i))
        for i, p in enumerate(_describe(path, leaf, records, Alone()))
    ]
    return Leaf(path, records, tuple(parts))


def _describe(path: str, leaf: Any, records: dict, processes: Alone) -> Iterator[Part]:
    cls = type(leaf)
    if CLASSES.get(cls.__name__) is cls:
        yield from _describe_parts(path, leaf, records, processes)
    elif isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        yield from _describe_array(path, leaf, records, processes)
    elif leaf is None:
        records[path] = {"is": "none"}
    elif cls in _from_python:
        records[path] = {"is": cls.__name__, "value": _from_python[cls](leaf)}
    else:
        raise TypeError(f"{cls.__name__} cannot be saved.")


def _saved_fields(cls: type) -> list[dataclasses.Field]:
    """Without those that say where an array is, rather than what."""
    return [f for f in dataclasses.fields(cls) if f.metadata.get("saved", True)]


def _describe_parts(
    path: str, node: Any, records: dict, processes: Alone
) -> Iterator[Part]:
    check_fit(node)
    static = {}
    parts = []
    for field in _saved_fields(type(node)):
        value = getattr(node, field.name)
        if field.metadata.get("static", False):
            static[field.name] = _static_to_json(value)
        else:
            parts += _describe(below(path, field.name), value, records, processes)
    is_there = not isinstance(getattr(node, "codes", None), jax.ShapeDtypeStruct)
    if isinstance(node, QuantizedArray) and is_there:
        check_codes(node)
    records[path] = {"is": type(node).__name__, "static": static}
    yield from parts


def _describe_array(
    path: str, array: Any, records: dict, processes: Alone
) -> Iterator[Part]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        records[path] = {"is": "key", "impl": str(jax.random.key_impl(array))}
        array = jax.random.key_data(array)
    dtype = np.dtype(array.dtype).newbyteorder("=")
    stored = dtype
    if dtype.name in _unnamed_dtypes:
        records[path] = {"is": "array", "dtype": dtype.name}
        stored = np.dtype(np.uint8)
    if stored not in DTYPES.values():
        raise TypeError(f"an array of the dtype {dtype} cannot be saved.")

    def make(share: Share) -> np.ndarray:
        out = np.asarray(share.make(), dtype)
        # Not by `ascontiguousarray`, which makes an axis where there is none.
        out = out if out.flags.c_contiguous else out.copy(order="C")
        return out if stored == dtype else out.view(stored)

    for share in processes.shares(array):
        piece = share.piece(path, tuple(array.shape))
        name = path if piece is None else f"{path}[{_range(share)}]"
        this = ft.partial(make, share)
        yield Part(name, stored, share.shape, this, share.owner, piece)


def _range(share: Share) -> str:
    ranges = zip(share.start or (), share.shape, strict=True)
    return ",".join(f"{start}:{start + size}" for start, size in ranges)


def _hex(x: float) -> str:
    return x.hex()


_from_python: dict[type, Callable[[Any], Any]] = {
    bool: bool,
    int: int,
    str: str,
    float: _hex,
    complex: lambda x: [_hex(x.real), _hex(x.imag)],
}


def _static_to_json(value: Any) -> Any:
    if isinstance(value, Format):
        return {"format": format_to_json(value)}
    if isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    ):
        return {"dtype": np.dtype(value).name}
    if isinstance(value, tuple):
        return [_static_to_json(x) for x in value]
    if isinstance(value, int | float | str):
        return value
    raise TypeError(f"a static field holds {value!r}, which cannot be saved.")


#
# From records
#


# What code that expects something else raises.
_of_bad_records = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Rebuilder:
    """Makes leaves of tensors and records. `get` gives the tensor of a name: described
    (`jax.ShapeDtypeStruct`) to check whether all fits before anything is read, or an
    array of NumPy."""

    def __init__(self, records: dict, tensors: Iterable[str], known: Known):
        self._records, self._tensors, self._known = records, set(tensors), known
        self._used: set[str] = set()  # Tensors and records.

    def roots(self) -> list[str]:
        """The paths of all leaves."""
        parts = set()
        for path, record in self._records.items():
            if cls := CLASSES.get(record["is"]):
                parts |= {below(path, f.name) for f in dataclasses.fields(cls)}
        return sorted((self._tensors | self._records.keys()) - parts)

    def build(self, path: str, get: Callable[[str], Any]) -> Any:
        try:
            return self._build(path, get)
        except _of_bad_records as error:
            raise ValueError(f"{path}: {error}") from error

    def check_all_used(self) -> None:
        """An error if something belongs to no leaf: it would be lost."""
        if left := (self._tensors | self._records.keys()) - self._used:
            raise ValueError(f"{sorted(left)[:5]} are no parts of any leaf.")

    def _build(self, path: str, get: Callable[[str], Any]) -> Any:
        record = self._records.get(path)
        if record is None:
            return self._tensor(path, get)
        self._used.add(path)
        kind = record["is"]
        if path in self._tensors and kind in ("none", *CLASSES, *_to_python):
            raise ValueError("there is a tensor of the same name.")
        if kind in CLASSES:
            return self._build_parts(path, CLASSES[kind], record, get)
        if kind == "none":
            return None
        if kind in _to_python and record.keys() == {"is", "value"}:
            return _to_python[kind](record["value"])
        if kind == "array" and record.get("dtype") in _unnamed_dtypes:
            return _as_dtype(self._tensor(path, get), _unnamed_dtypes[record["dtype"]])
        if kind == "key" and isinstance(record.get("impl"), str):
            return _as_key(self._tensor(path, get), record["impl"])
        raise ValueError(f"this version of eqquant does not know {record!r}.")

    def _has(self, path: str) -> bool:
        return path in self._tensors or path in self._records

    def _tensor(self, name: str, get: Callable[[str], Any]) -> Any:
        if name not in self._tensors:
            raise ValueError(f"there is no tensor {name!r}.")
        self._used.add(name)
        return get(name)

    def _build_parts(self, path: str, cls: type, record: dict, get: Callable) -> Any:
        static = record.get("static")
        fields = _saved_fields(cls)
        names = {f.name for f in fields if f.metadata.get("static", False)}
        if not isinstance(static, dict) or static.keys() != names:
            raise ValueError(f"{cls.__name__} has the static fields {sorted(names)}.")
        hints = typing.get_type_hints(cls)
        node = object.__new__(cls)
        for field in fields:
            if field.name in names:
                value = self._static(static[field.name])
                ok = is_bearable(value, hints[field.name])
            else:
                part = below(path, field.name)
                if field.default is None and not self._has(part):
                    value = None  # A file from before there was such a part.
                else:
                    value = self._build(part, get)
                plain = isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct)
                ok = plain or isinstance(value, PARTS.get((cls, field.name), ()))
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
            raise ValueError(f"{value!r} is not a static field.")
        return value


def _as_dtype(tensor: Any, dtype: np.dtype) -> Any:
    if tensor.dtype != np.uint8:
        raise ValueError(f"{dtype.name} is stored as uint8, not {tensor.dtype}.")
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
