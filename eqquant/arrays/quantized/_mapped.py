"""A check of the axes that `jax.vmap` maps.

`vmap` counts the axes of codes and scales, in which the blocked axis is last. These are
also the axes of the array, up to the first blocked axis. Behind it, `vmap` would map
another axis without an error.
"""

from typing import Any

import jax

from ..._jax import vmapped_axes


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
            _check(q, *vmapped)


def _check(q: Any, argument: str, mapped: list[int | None]) -> None:
    """Raise an error unless `vmap` maps the same leading axis of every part."""
    if all(axis is None for axis in mapped):
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
