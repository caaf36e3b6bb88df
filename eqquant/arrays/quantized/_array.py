"""The quantized array."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import wadler_lindig as wl
from jaxtyping import Array, Float, Shaped

from ..._jax import wide_dtype
from ...formats import gather_scales, num_codes, scales_and_offsets
from ...partition import spec_like, split_by_compiler
from .._contraction import Contraction
from .._implicit import stored
from .._matrices import inverse_order
from ._checks import check_cast_scales, check_codes, check_lead
from ._contraction import contract
from ._encode import encode_each_row
from ._structure import AbstractQuantizedArray


@stored
class QuantizedArray(AbstractQuantizedArray):
    """An array of codes and scales: `value = level(code) * scale`, and `+ offset` in
    affine formats.

    It is a pytree with two leaves. Offsets and double quantization
    ([`eqquant.formats.QuantizedScales`][]) add leaves. All leaves have the leading axes
    of the array, and determine its shape. So you can slice, stack, scan and map over
    the leaves, and the results are quantized arrays.

    Use [`eqquant.quantize`][] or [`eqquant.arrays.from_components`][] to make one. Do
    not call the class.

    `q @ x`, `x @ q`, indexing, `.T`, `.mT`, `.astype`, `.reshape`, `.transpose` and
    scaling such as `0.5 * q` need no wrapper. The layers of `eqx.nn`, except
    convolutions, use no other operations. All others need [`eqquant.quaxify`][]. A
    quantized array never becomes a plain array silently: functions of `jax.numpy` raise
    a `TypeError`.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nf4")
        assert q.shape == (64, 256) and q.nbytes == 64 * 256 // 2 + 64 * 4 * 4
        assert (q @ weight[0]).shape == (64,)
        assert isinstance(q[:8], eqquant.QuantizedArray)
        ```

    **Fields:**

    - `codes`: `(*lead, packed)`: one or several codes per byte. The blocked axis is
        last.
    - `scales`: `(*lead, blocks)`.
    - `format`: the format of both.
    - `dtype`: the dtype of the dequantized array.
    - `axes`: the blocked axes of the dequantized array, counted from its end.
    - `inner`: the sizes of all blocked axes except the first.
    - `padding`: the number of codes that fill the partial last block.
    - `offsets`: like `scales`, for an affine format; otherwise None.
    - `plan`: the sharding from [`eqquant.shard_tree`][], or None.
    - `compute`: an [`eqquant.kernels.Compute`][], the settings of products.
    """

    _misplaced = "It is quantized already. Dequantize it first: `eqquant.dequantize`."

    @property
    def block_size(self) -> int | None:
        return self.format.block_size

    def check_whole(self) -> None:
        super().check_whole()
        check_codes(self)
        check_lead(self)
        check_cast_scales(self)

    def replace(self, **fields):
        self.check_whole()
        return super().replace(**fields)

    def dequantize(self) -> Float[Array, "..."]:
        """Return the dequantized array."""
        self.check_whole()
        return _dequantize(self)

    def put(
        self, rows: Shaped[Array, "..."], fn: Callable[[Array, Array], Array]
    ) -> Any:
        if rows.ndim < -min(self.axes) or not rows.size:
            return NotImplemented
        if any(rows.shape[axis] != self.shape[axis] for axis in self.axes):
            return NotImplemented
        self.check_whole()
        rows = rows.astype(self.dtype)
        codes, parts, problems = encode_each_row(rows, self.format, self.axes, None)
        scales, offsets = scales_and_offsets(parts, self.format)
        # A row out of range becomes NaN, because a check under `jit` costs more.
        fits = ~problems[..., None]
        mark = lambda part, nan: part if nan is None else jnp.where(fits, part, nan)
        new = self.replace(
            codes=codes, scales=gather_scales(mark, scales, jnp.nan), offsets=offsets
        )
        return jax.tree.map(lambda part, n: fn(part, n.astype(part.dtype)), self, new)

    @property
    def rounds_activations(self) -> bool:
        return self.compute.activations == "int8"

    def contract(self, x, contraction: Contraction) -> Any:
        self.check_whole()
        return contract(self, x, contraction)

    def __pdoc__(self, **kwargs):
        if not self.is_whole:  # A pytree with other leaves, such as specs.
            parts = f"codes={self.codes!r}, scales={self.scales!r}"
            return wl.TextDoc(f"{self.format.name}({parts})")
        del kwargs
        dtype = self.dtype.name.replace("float", "f")
        shape = ",".join(map(str, self.shape))
        return wl.TextDoc(f"{self.format.name}:{dtype}[{shape}]")


# Compiled as one program, even in eager calls, so that no intermediate array is stored.
@ft.partial(jax.jit, inline=True)
def _dequantize(q: QuantizedArray) -> Float[Array, "..."]:
    # Sharded like the codes, if all devices get equal parts.
    stored = [*q.lead_axes, q.blocked_axes[0]]
    axes = [stored.index(i) if i in stored else None for i in range(q.ndim)]
    spec = spec_like(q.codes, q.shape, axes)
    return split_by_compiler(_decode, q.codes, spec)(q)


def _decode(q: QuantizedArray) -> Float[Array, "..."]:
    compute = wide_dtype(q.dtype)
    if q.scales.dtype == jnp.float64:
        compute = jnp.promote_types(compute, jnp.float64)
    *lead, packed = q.codes.shape
    blocks = q.scales.shape[-1]
    size = num_codes(packed, q.format.bits)
    levels = q.format.levels(q.format.ordered_states(q.codes), compute)
    if size:
        levels = levels.reshape(*lead, blocks, size // blocks)
        levels = levels * q.scales.astype(compute)[..., None]
        if q.offsets is not None:
            # Round before the addition; otherwise XLA may fuse the two.
            levels = jnp.where(levels == levels, levels, jnp.nan)
            levels = levels + q.offsets.astype(compute)[..., None]
    values = levels.reshape(*lead, size)[..., : size - q.padding]
    shape = q.shape
    values = values.reshape(*lead, *(shape[axis] for axis in q.blocked_axes))
    values = jnp.transpose(values, inverse_order((*q.lead_axes, *q.blocked_axes)))
    return values.astype(q.dtype)


def quantized_arrays(tree: Any) -> list[QuantizedArray]:
    """Return all quantized arrays in a pytree, including those inside of others."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_quantized_array)
    return [leaf for leaf in leaves if _is_quantized_array(leaf)]


def replace_quantized(fn: Callable[[QuantizedArray], Any], tree: Any) -> Any:
    """Replace each quantized array in a pytree by `fn` of it."""
    replace = lambda x: fn(x) if _is_quantized_array(x) else x
    return jax.tree.map(replace, tree, is_leaf=_is_quantized_array)


def _is_quantized_array(x: Any) -> bool:
    return isinstance(x, QuantizedArray)


def without_unsaved(tree: Any) -> Any:
    """Reset the static fields of quantized arrays that checkpoints do not store."""
    unsaved = {
        field.name: field.default
        for field in dataclasses.fields(QuantizedArray)
        if not field.metadata.get("saved", True)
    }
    return replace_quantized(lambda q: q.with_static(**unsaved), tree)
