"""Convert leaves of a tree to tensors and records."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import is_traced
from ...arrays import is_implicit, quantized_arrays, QuantizedArray, without_unsaved
from ...formats import Format
from ..files import DTYPES, to_numpy
from ._check import check_codes, check_fit, CLASSES
from ._formats import format_to_json
from ._leaf import below, Leaf, Part, saved_fields, UNNAMED_DTYPES
from ._processes import Share, SingleProcess
from ._rebuild import Rebuilder


def describe(path: str, leaf: Any, processes: SingleProcess) -> Leaf | None:
    """Describe a leaf; return `None` if it holds no data."""
    parts = jax.tree.leaves(leaf)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in parts):
        raise TypeError("a jax.ShapeDtypeStruct cannot be saved: it has no values.")
    if any(is_traced(x) for x in parts):
        raise TypeError("traced arrays cannot be saved: call this outside of `jit`.")
    if is_no_data(leaf):
        return None
    records: dict[str, dict[str, Any]] = {}
    parts = tuple(_describe(path, leaf, records, processes))
    if is_implicit(leaf):
        _check_round_trip(path, leaf, records, parts)
    return Leaf(path, records, parts)


def _check_round_trip(path: str, leaf: Any, records: dict, parts: Iterable) -> None:
    """Raise a `ValueError` if `load` could not rebuild the leaf."""
    known = {q.format.name: type(q.format) for q in quantized_arrays(leaf)}
    described = dict(part.whole for part in parts)
    rebuilt = Rebuilder(records, described, known).build(path, described.__getitem__)
    if jax.tree.structure(rebuilt) != jax.tree.structure(without_unsaved(leaf)):
        raise ValueError(f"{leaf!r} would change when it is loaded.")


def is_no_data(leaf: Any) -> bool:
    """Return whether a leaf holds no data: a function, or the placeholder that
    `eqx.nn.Shared` puts in place of an array."""
    is_placeholder = type(leaf).__qualname__ == "SharedNode"
    is_array = is_implicit(leaf) or hasattr(leaf, "dtype")
    return is_placeholder or (callable(leaf) and not is_array)


def describe_later(path: str, leaf: Any, make: Callable[[], Any]) -> Leaf:
    """Describe a leaf from abstract arrays. `make` creates the leaf when its first part
    is written, and the leaf is freed after its last part."""
    pending: list[Any] = []

    def part(i: int) -> np.ndarray:
        if not pending:
            pending.extend(jax.tree.leaves(make()))
        out, pending[i] = to_numpy(pending[i]), None
        if all(x is None for x in pending):
            pending.clear()
        return out

    records: dict[str, dict[str, Any]] = {}
    parts = [
        dataclasses.replace(p, make=ft.partial(part, i))
        for i, p in enumerate(_describe(path, leaf, records, SingleProcess()))
    ]
    return Leaf(path, records, tuple(parts))


def _describe(
    path: str, leaf: Any, records: dict, processes: SingleProcess
) -> Iterator[Part]:
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


def _describe_parts(
    path: str, node: Any, records: dict, processes: SingleProcess
) -> Iterator[Part]:
    check_fit(node)
    static = {}
    parts = []
    for field in saved_fields(type(node)):
        value = getattr(node, field.name)
        if field.metadata.get("static", False):
            static[field.name] = _static_to_json(value)
        else:
            parts += _describe(below(path, field.name), value, records, processes)
    is_abstract = isinstance(getattr(node, "codes", None), jax.ShapeDtypeStruct)
    if isinstance(node, QuantizedArray) and not is_abstract:
        check_codes(node)
    records[path] = {"is": type(node).__name__, "static": static}
    yield from parts


def _describe_array(
    path: str, array: Any, records: dict, processes: SingleProcess
) -> Iterator[Part]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        records[path] = {"is": "key", "impl": str(jax.random.key_impl(array))}
        array = jax.random.key_data(array)
    dtype = np.dtype(array.dtype).newbyteorder("=")
    stored = dtype
    if dtype.name in UNNAMED_DTYPES:
        records[path] = {"is": "array", "dtype": dtype.name}
        stored = np.dtype(np.uint8)
    if stored not in DTYPES.values():
        raise TypeError(f"the dtype {dtype} cannot be saved; safetensors lacks it.")

    def make(share: Share) -> np.ndarray:
        out = np.asarray(share.make(), dtype)
        # `np.ascontiguousarray` would turn a scalar into a vector.
        out = out if out.flags.c_contiguous else out.copy(order="C")
        return out if stored == dtype else out.view(stored)

    for share in processes.shares(array):
        piece = share.piece(path, tuple(array.shape))
        name = path if piece is None else f"{path}[{_range(share)}]"
        yield Part(
            name, stored, share.shape, ft.partial(make, share), share.owner, piece
        )


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
    raise TypeError(f"a static field is {value!r}, which cannot be saved.")
