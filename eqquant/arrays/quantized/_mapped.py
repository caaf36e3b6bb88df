"""Checks of arrays that JAX rebuilds from their leaves.

`jax.vmap` counts the axes of codes and scales, in which the blocked axis is last. These
are also the axes of the array, up to the first blocked axis. Behind it, `vmap` would
map another axis without an error. `jax.tree.map` may compute with codes.
"""

import functools as ft
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..._jax import (
    arithmetic_of,
    is_psum,
    is_traced,
    mapped_leaves,
    unmapped,
    vmapped_axes,
)


_ADVICE = (
    "Codes are not numbers. To add or average models, use "
    "`eqquant.trees.average_trees`. To make an array of new codes, use "
    "`eqquant.arrays.from_components`."
)


class CheckedAxes:
    """The field `axes` of a quantized array. JAX sets it after the parts when it
    rebuilds an array from its leaves, so that the parts can be checked."""

    def __get__(self, q: Any, owner: type | None = None):
        if q is None:
            return self
        try:
            return q.__dict__["axes"]
        except KeyError:
            raise AttributeError(f"{type(q).__name__} has no axes yet.") from None

    def __set__(self, q: Any, axes: tuple[int, ...]) -> None:
        q.__dict__["axes"] = axes
        parts = lambda: jax.tree.leaves((q.codes, q.scales, q.offsets))
        if vmapped := vmapped_axes(parts):
            _check_axes(q, *vmapped)
        arguments, are_codes = mapped_leaves(), _are_codes(q)
        # One model is checked only inside of `jit`, where no values are read.
        if len(arguments) > 1 or (arguments and are_codes and is_traced(q.codes)):
            _check_codes(q, arguments)
        if are_codes and is_psum():
            raise TypeError(f"psum: codes of {q.format!r} cannot be added. {_ADVICE}")


def _are_codes(q: Any) -> bool:
    return getattr(q.codes, "dtype", None) == q.format.code_dtype


def _check_axes(q: Any, argument: str, mapped: list[int | None]) -> None:
    """Raise an error unless `vmap` maps the same leading axis of every part."""
    if q.codes is None or all(axis is None for axis in mapped):
        return
    ndim = q.codes.ndim - 1 + len(q.axes) + (argument == "in_axes")
    leading = range(ndim + min(q.axes))
    if len(set(mapped)) == 1 and mapped[0] in leading:
        return
    raise ValueError(
        f"vmap: {argument} must name one of the axes {list(leading)} of a quantized "
        f"array of {ndim} axes whose blocked axes are {[a + ndim for a in q.axes]}, "
        f"got {mapped} for its codes and scales. `jax.vmap` counts the axes of codes "
        "and scales, in which the blocked axis is last. To map another axis of the "
        "array, wrap the mapped function: `eqquant.quaxify(jax.vmap(fn, ...))`."
    )


def _check_codes(q: Any, arguments: Sequence[list]) -> None:
    """Raise an error if `jax.tree.map` of models has computed new codes from theirs,
    for example their sum. `arguments` contains the leaves of each model.

    Codes may be chosen from the models, one by one or by rows. The values of traced
    codes are unknown: their last operations are checked.
    """
    codes = q.codes
    if any(codes is leaf for leaves in arguments for leaf in leaves):
        return
    kind = lambda x: (getattr(x, "shape", None), getattr(x, "dtype", None))
    is_like = lambda x: kind(x) == kind(codes)
    codes = unmapped(codes)
    arguments = [[unmapped(leaf) for leaf in leaves] for leaves in arguments]
    inputs = [leaf for leaves in arguments for leaf in leaves]
    if any(codes is leaf for leaf in inputs):
        return
    if is_traced(codes):
        if (_are_codes(q) or any(map(is_like, inputs))) and (
            name := arithmetic_of(codes, inputs)
        ):
            got = f"the results of `{name}`. To choose between models, use `jnp.where`"
            raise _computed(q, arguments, got)
        return
    if not _is_local(codes) or not codes.size:
        return
    # The position of these codes among the leaves is unknown.
    places = (
        [x for x in leaves if _is_local(x) and is_like(x)]
        for leaves in zip(*arguments, strict=True)
    )
    places = [inputs for inputs in places if len(inputs) > 1]
    are_chosen = lambda by: any(by(codes, inputs) for inputs in places)
    if not places or are_chosen(_by_element) or are_chosen(_by_row):
        return
    raise _computed(q, arguments, "other codes, such as their sum")


def _computed(q: Any, arguments: Sequence[list], got: str) -> TypeError:
    return TypeError(
        f"jax.tree.map: codes of {q.format!r} must be those of one of the "
        f"{len(arguments)} models, got {got}. {_ADVICE}"
    )


def _by_element(codes: Any, inputs: Sequence[Any]) -> bool:
    """Return whether each code equals the code of an input in the same place."""
    is_any = lambda of: ft.reduce(operator.or_, (of(codes) == of(x) for x in inputs))
    # Usually, the first row shows that the inputs are those of another array.
    return bool(np.all(is_any(_first_row)) and np.all(is_any(np.asarray)))


def _by_row(codes: Any, inputs: Sequence[Any]) -> bool:
    """Return whether each row of codes is a row of an input."""
    first = _first_row(codes)
    if not any(np.any(np.all(np.asarray(x) == first, -1)) for x in inputs):
        return False
    rows = lambda x: {row.tobytes() for row in np.asarray(x).reshape(-1, x.shape[-1])}
    return rows(codes) <= set().union(*map(rows, inputs))


def _first_row(x: Any) -> np.ndarray:
    first = (0,) * (x.ndim - 1)
    is_remote = isinstance(x, jax.Array) and any(
        d.platform != "cpu" for d in x.devices()
    )
    return np.asarray(x[first]) if is_remote else np.asarray(x)[first]


def _is_local(part: Any) -> bool:
    """Return whether the values of a part are known in this process."""
    is_array = isinstance(part, jax.Array | np.ndarray) and not is_traced(part)
    return is_array and getattr(part, "is_fully_addressable", True)
