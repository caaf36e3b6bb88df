"""A float weight whose products are computed in low precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Float, Key, Shaped

from ...arrays import (
    ArrayOperators,
    Contraction,
    is_implicit,
    other_axes,
    Role,
    scaled,
)
from ...partition import reshard_to
from ._primitives import low_precision_dot
from ._specs import Recipe


class LowPrecisionArray(ArrayOperators):
    """A float weight whose products, and their gradients, are computed in low
    precision. All other operations use the float weight.

    [`eqquant.training.low_precision`][] makes one.

    **Fields:**

    - `master`: the weight.
    - `key`: `(*lead)`, the key of stochastic rounding, or None. See
        [`eqquant.training.with_rounding_key`][].
    - `recipe`: the numbers of the products, a [`eqquant.training.Recipe`][].
    - `in_axes`, `out_axes`: the axes of the inputs and outputs of the layer, counted
        from the end. The other axes, `lead`, count matrices.
    """

    roles: ClassVar[Mapping[str, Role]] = {"in_axes": "free", "out_axes": "free"}
    part_types: ClassVar[Mapping[str, tuple[type, ...]]] = {"key": (type(None),)}
    stored_part = "master"
    _misplaced = "Take the float weights with `eqquant.training.master_weights`."

    master: Float[Array, "..."]
    key: Key[Array, "*lead"] | None
    recipe: Recipe = eqx.field(static=True)
    in_axes: tuple[int, ...] = eqx.field(static=True)
    out_axes: tuple[int, ...] = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.master.shape)

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.master.dtype

    @property
    def is_whole(self) -> bool:
        return hasattr(self.master, "shape")

    def dequantize(self) -> Float[Array, "..."]:
        """Return the float weight."""
        return self.master

    def problems(self) -> Iterator[str | Exception]:
        yield from super().problems()
        if is_implicit(self.master):
            yield (
                "a weight in low precision must be a float array, got "
                f"{self.master!r}. `eqquant.training.master_weights` returns a model "
                "without low precision."
            )
        if not jnp.issubdtype(self.dtype, jnp.floating):
            yield f"master must be floating point, got {self.dtype}."

    #
    # Structure
    #

    @property
    def lead_axes(self) -> tuple[int, ...]:
        """The axes that count matrices."""
        return other_axes(self.ndim, self.in_axes, self.out_axes)

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        lead = other_axes(ndim, groups["in_axes"], groups["out_axes"])
        return {"master": tuple(range(ndim)), "key": lead}

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return ()

    @property
    def whole_axes(self) -> int | None:
        whole = self.in_axes
        if self.lead_axes:
            whole = (*self.in_axes, *self.out_axes)
        n = len(whole)
        return n if sorted(whole) == list(range(-n, 0)) else None

    def with_dtype(self, dtype) -> "LowPrecisionArray":
        return self.replace(master=self.master.astype(dtype))

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        return self.replace(master=scaled(self.master, factor, fn))

    #
    # Products
    #

    @property
    def rounds_activations(self) -> bool:
        return False  # The product with the float weight rounds nothing.

    def contract(self, x, contraction: Contraction) -> Any:
        over, batch = contraction.over, contraction.batch
        out_dtype = contraction.result_dtype(self, x)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        if not over or not is_float or not jnp.issubdtype(out_dtype, jnp.floating):
            return NotImplemented
        (w_over, x_over), (w_batch, x_batch) = (
            tuple(zip(*pairs, strict=True)) or ((), ()) for pairs in (over, batch)
        )
        w_free = other_axes(self.ndim, w_over, w_batch)
        x_free = other_axes(x.ndim, x_over, x_batch)
        w = _merged(self.master, w_batch, w_free, w_over, merge_free=True)
        x = _merged(x, x_batch, x_free, x_over, merge_free=False)
        key = self.key
        if key is not None:
            key = self._key_of(w_batch)
        out = low_precision_dot(x, w, key, recipe=self.recipe, out_dtype=out_dtype)
        if len(w_free) != 1:
            out = out.reshape(*out.shape[:-1], *(self.shape[i] for i in w_free))
        return reshard_to(out, contraction.out_sharding)

    def _key_of(self, w_batch: Sequence[int]) -> Any:
        """Return the keys of a stack of matrices, or one for a single matrix."""
        assert self.key is not None
        if sorted(w_batch) == sorted(self.lead_axes):
            order = [self.lead_axes.index(axis) for axis in w_batch]
            return jnp.transpose(self.key, order)
        # Noise depends on the position, so one key serves all matrices.
        sizes = [self.shape[axis] for axis in w_batch]
        return jnp.broadcast_to(self.key.reshape(-1)[0], sizes)

    def __pdoc__(self, **kwargs):
        name = f"low_precision[{self.recipe.forward}]("
        return wl.TextDoc(name) + wl.pdoc(self.master, **kwargs) + wl.TextDoc(")")


def _merged(x, batch, free, over, *, merge_free: bool):
    """Return an array with axes `(*batch, *free, over)`. The contracted axes are
    merged, and with `merge_free` also the free ones."""
    order = (*batch, *free, *over)
    if order != tuple(range(x.ndim)):
        x = jnp.transpose(x, order)
    lead = x.shape[: len(batch)]
    frees = x.shape[len(batch) : len(batch) + len(free)]
    if len(over) == 1 and (len(free) == 1 or not merge_free):
        return x
    size = -1 if 0 not in x.shape else int(np.prod(x.shape[len(lead) + len(frees) :]))
    frees = (int(np.prod(frees)),) if merge_free else frees
    return x.reshape(*lead, *frees, size)
