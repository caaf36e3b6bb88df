"""Quantize caches of keys and values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import typed
from ..arrays import (
    CachedArray,
    canonical_axes,
    check_rotation,
    is_implicit,
    last_tokens,
    quantize,
    rotated,
    RotatedArray,
)
from ..formats import as_format, Format
from ..kernels import as_compute, Compute
from ._sites import Tree


# Defaults with rotation in fewer than 8 bits. With them, int4 loses less than .01 nats
# of SmolLM2-135M: docs/benchmarks/kv-cache.md.
_RECENT, _SINKS = 64, 4


@typed
def quantize_cache(
    cache: Tree,
    format: Format | str = "int8",
    *,
    axis: Any = -1,
    tokens: Any = None,
    rotate: bool | int = False,
    per_channel: Any = False,
    recent: int | None = None,
    sinks: int | None = None,
    window: Any = 0,
    longest: int = 1,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> Tree:
    """Quantize a cache of keys and values, so that a token can be replaced without
    decoding the others.

    Model code does not change. It writes tokens with `jax.lax.dynamic_update_slice` or
    `.at[...].set(...)`, and multiplies by keys and values, under [`eqquant.quaxify`][].

    With `rotate`, keys and values are rotated by Hadamard matrices before they are
    rounded, which spreads the large channels of keys (QuaRot, arXiv 2404.00456). A
    product rotates the queries, and rotates its result back: `(q H) (k H) = q k`.
    Quantize keys after their position embedding. In fewer than 8 bits, `rotate` also
    keeps 4 sinks and 64 recent tokens in floating point by default.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        zeros = jnp.zeros((4, 512, 64))  # (heads, tokens, size)
        cache = {"keys": zeros, "values": zeros}
        cache = eqquant.trees.quantize_cache(cache, "int4", rotate=True)

        def step(cache, i, key, query):
            keys = jax.lax.dynamic_update_index_in_dim(cache["keys"], key, i, 1)
            return {**cache, "keys": keys}, jnp.einsum("hd,htd->ht", query, keys)

        run = jax.jit(eqquant.quaxify(step, on_materialise="error"), donate_argnums=0)
        cache, scores = run(cache, 0, *jnp.ones((2, 4, 64)))
        assert abs(scores[:, 0] - 64).max() < 1
        ```

    **Arguments:**

    - `cache`: a pytree of float arrays. Other leaves are kept.
    - `format`: as in [`eqquant.quantize`][].
    - `axis`: the axis of the head size, in every array. `-2` for keys that are stored
        as columns, `(..., size, tokens)`.
    - `tokens`: the axis of tokens. By default, the other one of the last two axes. If
        tokens stay in floating point, it must be right: `-3` for an array `(tokens,
        heads, size)`.
    - `rotate`: whether to rotate. The block is the largest power of two that divides
        the head size, and at most `rotate` if it is a number.
    - `per_channel`: whether scales run along tokens, in groups of the block size of the
        format, which suits keys (KIVI, arXiv 2402.02750). By default, scales run along
        `axis`, so each token and head has its own. The newest group stays in floating
        point, in `recent`.
    - `recent`: the number of last tokens that stay in floating point. With
        `per_channel`, a multiple of the group, and at least one group. The default is
        64, or the number of tokens if that is smaller, with `rotate` and a format of
        fewer than 8 bits; 0 otherwise.
    - `sinks`: the number of first tokens that stay in floating point (attention sinks,
        arXiv 2309.17453). Then `recent` is at least 1. The default is 4 in the same
        case, and 0 otherwise.
    - `window`: the number of tokens that a query sees, including its own, or 0 for all
        tokens. With a window, a ring buffer replaces the array: it holds `window` +
        `longest` - 1 tokens and the sinks, and all others read as zero. The model must
        mask the tokens outside of the window.
    - `longest`: the largest number of tokens that one write has, with a window.
    - `precision`, `activations`, `compute`: as in [`eqquant.quantize`][].

    `axis`, `tokens`, `per_channel` and `window` may also be pytrees with the structure
    of `cache` or of its top.

    **Returns:**

    The cache, with a [`eqquant.QuantizedArray`][] for each array. With `recent`,
    `sinks` or `window`, it is an [`eqquant.arrays.CachedArray`][] instead. With
    `rotate`, an [`eqquant.arrays.RotatedArray`][] contains it.

    **Raises:**

    The errors of [`eqquant.quantize`][]; `ValueError` if `rotate` is set and the head
    size is odd, if a number of tokens does not fit the array, or if a pytree of options
    does not have the structure of `cache`.
    """
    compute = as_compute(compute, precision, activations)
    format = as_format(format, "quantize_cache")
    check_rotation("quantize_cache", rotate)
    for name, count, least in (
        ("recent", recent, 0),
        ("sinks", sinks, 0),
        ("longest", longest, 1),
    ):
        if count is not None and count < least:
            raise ValueError(
                f"quantize_cache: {name} must be {least} or more, got {count}."
            )
    varying = {"axis": axis, "per_channel": per_channel, "window": window}
    if tokens is not None:
        varying["tokens"] = tokens
    options = {name: _for_leaves(name, x, cache) for name, x in varying.items()}
    leaves, treedef = jax.tree.flatten(cache, is_leaf=is_implicit)
    found = []
    for i, array in enumerate(leaves):
        is_float = jnp.issubdtype(getattr(array, "dtype", bool), jnp.floating)
        if is_implicit(array) or not is_float:
            found.append(array)
            continue
        own = {name: values[i] for name, values in options.items()}
        own |= {"recent": recent, "sinks": sinks, "rotate": rotate}
        layout = _Layout.of(array, format, **own)
        found.append(_quantize_one(array, layout, longest, compute))
    return jax.tree.unflatten(treedef, found)


def _for_leaves(name: str, value: Any, cache: Any) -> list:
    """Return the value of an option for each leaf."""
    spread = lambda x, part: jax.tree.map(lambda _: x, part, is_leaf=is_implicit)
    try:
        return jax.tree.leaves(jax.tree.map(spread, value, cache))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"quantize_cache: {name} must be one value, or a pytree of values with the "
            f"structure of cache, got {value!r}."
        ) from error


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How an array of a cache is stored. Axes are counted from the end."""

    format: Format
    axis: int
    tokens: int
    per_channel: bool
    window: int
    rotate: bool | int
    recent: int
    sinks: int

    @classmethod
    def of(
        cls, array, format: Format, axis, tokens=None, *, recent, sinks, **options
    ) -> "_Layout":
        """Return a layout with the defaults of an array, after checking that it suits
        the array."""
        (axis,) = canonical_axes(axis, array.ndim)
        if tokens is None:
            tokens = -1 if axis == -2 else -2
        room = 0
        if options["rotate"] and format.bits < 8 and -array.ndim <= tokens < array.ndim:
            room = min(array.shape[tokens], options["window"] or array.shape[tokens])
        recent = min(_RECENT, room) if recent is None else recent
        sinks = min(_SINKS, room) if sinks is None else sinks
        layout = cls(format, axis, tokens, **options, recent=recent, sinks=sinks)
        if layout.is_simple:  # It does not use `tokens`.
            return layout
        (tokens,) = canonical_axes(tokens, array.ndim)
        layout = dataclasses.replace(layout, tokens=tokens)
        layout._check(array)
        return layout

    @property
    def is_simple(self) -> bool:
        return not (self.per_channel or self.window or self.recent or self.sinks)

    def _check(self, array) -> None:
        count = array.shape[self.tokens] if array.ndim > 1 else 0
        problem = None
        if self.tokens == self.axis or array.ndim < 2:
            problem = "tokens must be another axis than axis"
        elif self.window < 0:
            problem = "window must be 0 or more"
        elif self.recent > count or self.sinks > count:
            problem = f"recent and sinks must be at most the {count} tokens"
        elif self.per_channel and self.window:
            problem = "a window cannot be combined with per_channel: pass one of them"
        elif self.per_channel:
            problem = self._problem_of_groups(count)
        if problem:
            raise ValueError(
                f"quantize_cache: {problem}; got an array of shape {array.shape} with "
                f"axis={self.axis}, tokens={self.tokens}, recent={self.recent}, "
                f"sinks={self.sinks}, window={self.window}."
            )

    def _problem_of_groups(self, count: int) -> str | None:
        group = self.format.block_size
        if group is None or self.format.quantized_scales or self.format.history:
            return (
                "per_channel needs a format with a block size, and without quantized "
                f"scales, such as Int4(block_size=32), got {self.format!r}"
            )
        if count % group:
            return f"per_channel needs a multiple of {group} tokens, the block size"
        if self.recent < group or self.recent % group:
            return (
                f"per_channel needs recent to be a multiple of {group}, the block size"
            )
        return None


def _quantize_one(array, layout: _Layout, longest: int, compute: Compute) -> Any:
    rotate = layout.rotate
    stored, block = rotated(array, layout.axis, rotate) if rotate else (array, 1)
    if rotate and block == 1:
        raise ValueError(
            "quantize_cache: rotate needs an even head size, but axis "
            f"{layout.axis} of an array of shape {array.shape} has "
            f"{array.shape[layout.axis]} values. Pass rotate=False, or another axis."
        )
    if layout.is_simple:
        base: Any = quantize(stored, layout.format, axis=layout.axis, compute=compute)
    else:
        base = _cached(stored, layout, longest, compute)
    return RotatedArray(base.with_dtype(array.dtype), block) if rotate else base


def _cached(array, layout: _Layout, longest: int, compute: Compute) -> Any:
    format, axis, tokens = layout.format, layout.axis, layout.tokens
    moved = jnp.moveaxis(array, (tokens, axis), (-2, -1))
    count = moved.shape[-2]

    def slots(count: int):
        values, positions = last_tokens(moved, count)
        return values, jnp.broadcast_to(positions, values.shape[:-1])

    def make(base, values, positions, first, longest=None):
        axes = tokens, axis
        return CachedArray(base, values, positions, first, axes, count, longest)

    kept, sinks = layout.recent, layout.sinks
    size = layout.window + longest - 1
    if layout.window and size < count:
        values, positions = slots(size)
        values = quantize(values, format, compute=compute)
        base = make(None, values, positions, None, longest)
    else:
        blocked = tokens if layout.per_channel else axis
        base = quantize(array, format, axis=blocked, compute=compute)
    if not (kept or sinks):
        return base  # A ring buffer, or the window has room for all tokens.
    first = moved[..., :sinks, :] if sinks else None
    return make(base, *slots(max(kept, 1)), first)
