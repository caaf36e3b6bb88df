"""Primitives that move values about: exact, on the components."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._array import QuantizedArray
from ._registry import register, register_names


def on_components(fn, q: QuantizedArray) -> QuantizedArray:
    return q.replace(codes=fn(q.codes), scales=fn(q.scales))


@register(lax.transpose_p)
def _transpose(q, *, permutation, **_):
    return q.transpose(permutation)


@register(lax.reshape_p)
def _reshape(q, *, new_sizes, dimensions, **_):
    return NotImplemented if dimensions is not None else q.with_shape(new_sizes)


@register(lax.squeeze_p)
def _squeeze(q, *, dimensions, **_):
    return q.squeeze(dimensions)


@register(lax.broadcast_in_dim_p)
def _broadcast_in_dim(q, *dynamic, shape, broadcast_dimensions, **_):
    if dynamic:
        return NotImplemented
    return q.broadcast_in_dim(shape, broadcast_dimensions)


@register(lax.slice_p)
def _slice(q, *, start_indices, limit_indices, strides, **_):
    return q.slice(start_indices, limit_indices, strides)


@register(lax.split_p)
def _split(q, *, sizes, axis, **_):
    parts, start = [], 0
    for size in sizes:
        lower, upper = [0] * q.ndim, list(q.shape)
        lower[axis], upper[axis] = start, start + int(size)
        part = q.slice(lower, upper)
        if part is NotImplemented:
            return NotImplemented
        parts.append(part)
        start += int(size)
    return parts


@register(lax.dynamic_slice_p)
def _dynamic_slice(q, *start, slice_sizes, **_):
    if not isinstance(q, QuantizedArray) or len(start) != q.ndim:
        return NotImplemented
    return q.dynamic_slice(start, slice_sizes)


@register(lax.gather_p)
def _gather(q, indices, *, dimension_numbers, slice_sizes, **params):
    """Rows, or matrices out of a stack: the same gather on both components.

    Rows are decoded, as indexing does; only they are.
    """
    numbers = dimension_numbers
    if not isinstance(q, QuantizedArray) or isinstance(indices, QuantizedArray):
        return NotImplemented
    if any(slice_sizes[axis] != q.shape[axis] for axis in q.blocked_axes):
        return NotImplemented
    if sorted(q.blocked_axes) != list(range(q.ndim - len(q.axes), q.ndim)):
        return NotImplemented
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if gone & set(q.blocked_axes):
        return NotImplemented
    # Slices keep the order of their axes, so those of the blocked ones are the last.
    blocked = numbers.offset_dims[len(numbers.offset_dims) - len(q.axes) :]
    ndim = len(numbers.offset_dims) + indices.ndim - 1
    if blocked != tuple(range(ndim - len(q.axes), ndim)):
        return NotImplemented
    # A blocked axis is taken whole, so that a start along it can only be zero.
    first = min(q.blocked_axes)
    starts = [i for i, axis in enumerate(numbers.start_index_map) if axis < first]
    if len(starts) < len(numbers.start_index_map):
        indices = indices[..., jnp.asarray(starts, int)]
    kept = numbers.offset_dims[: len(numbers.offset_dims) - len(q.axes)]
    numbers = numbers._replace(
        offset_dims=(*kept, ndim - len(q.axes)),
        start_index_map=tuple(numbers.start_index_map[i] for i in starts),
    )

    fill = params["fill_value"]
    if fill is not None and fill != 0 and fill == fill:
        return NotImplemented

    def gather(a, fill=None):
        sizes = (*slice_sizes[:first], a.shape[-1])
        return lax.gather(
            a, indices, numbers, sizes, mode=params["mode"], fill_value=fill
        )

    out = q.replace(codes=gather(q.codes), scales=gather(q.scales, fill))
    # Under `vmap` an index is a slice of one element: those axes go away next.
    return out if sum(size > 1 for size in slice_sizes) >= 2 else out.dequantize()


@register(lax.rev_p)
def _rev(q, *, dimensions, **_):
    return q.reverse(dimensions)


@register(lax.concatenate_p)
def _concatenate(*operands, dimension, **_):
    first = operands[0]
    if not all(isinstance(q, QuantizedArray) for q in operands):
        return NotImplemented
    if dimension in first.blocked_axes:
        return NotImplemented
    lead = first.lead_axes.index(dimension)
    structures = {jax.tree.structure(q) for q in operands}
    if len(structures) > 1:
        return NotImplemented

    def join(name):
        return lax.concatenate([getattr(q, name) for q in operands], lead)

    return first.replace(codes=join("codes"), scales=join("scales"))


@register_names("stack")  # From 0.10.2; before, broadcast and concatenated.
def _stack(*operands, axis, **_):
    rows = []
    for q in operands:
        if not isinstance(q, QuantizedArray):
            return NotImplemented
        dimensions = [i for i in range(q.ndim + 1) if i != axis]
        shape = (*q.shape[:axis], 1, *q.shape[axis:])
        rows.append(q.broadcast_in_dim(shape, dimensions))
    return _concatenate(*rows, dimension=axis)


@register(lax.convert_element_type_p)
def _convert_element_type(q, *, new_dtype, **_):
    if not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return q.replace(dtype=jnp.dtype(new_dtype))


@register(lax.select_n_p)
def _select_n(which, *cases, **_):
    if not all(isinstance(q, QuantizedArray) for q in cases) or jnp.ndim(which):
        return NotImplemented
    if isinstance(which, QuantizedArray):
        return NotImplemented
    if len({jax.tree.structure(q) for q in cases}) > 1:
        return NotImplemented

    def select(name):
        return lax.select_n(which, *(getattr(q, name) for q in cases))

    return cases[0].replace(codes=select("codes"), scales=select("scales"))


@register_names("copy", "copy_p")
def _copy(q, **_):
    return on_components(jnp.copy, q)


@register_names("stop_gradient")
def _stop_gradient(q, **_):
    return on_components(lax.stop_gradient, q)


@register_names("name")
def _identity(q, **_):
    return q


@register_names("pvary", "pcast")
def _pcast(q, *, axes, **_):
    return on_components(lambda a: lax.pcast(a, axes, to="varying"), q)


@register(lax.optimization_barrier_p)
def _optimization_barrier(*operands, **_):
    leaves, tree = jax.tree.flatten(list(operands))
    return jax.tree.unflatten(tree, lax.optimization_barrier(leaves))


#
# Placement
#


def component_specs(q: QuantizedArray, spec):
    """The specs of codes and scales that split them as `spec` splits the array; or
    NotImplemented, where that would cut through a block."""
    entries = [*spec, *[None] * (q.ndim - len(spec))]
    lead = [entries[axis] for axis in q.lead_axes]
    first, *others = (entries[axis] for axis in q.blocked_axes)
    if any(entry is not None for entry in others):
        return NotImplemented
    if first is not None and (q.padding or q.inner):
        return NotImplemented
    blocks = None if q.scales.shape[-1] == 1 else first
    return PartitionSpec(*lead, first), PartitionSpec(*lead, blocks)


def splits_evenly(q: QuantizedArray, spec, mesh) -> bool:
    """Whether each device gets whole groups of codes and whole blocks."""
    entry = [*spec, *[None] * (q.ndim - len(spec))][q.blocked_axes[0]]
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    parts = 1
    for name in names:
        parts *= mesh.shape[name]
    group_bytes = max(1, q.format.group * q.format.bits // 8)
    blocks = q.scales.shape[-1]
    return q.codes.shape[-1] % (parts * group_bytes) == 0 and (
        blocks == 1 or blocks % parts == 0
    )


def _component_shardings(q, sharding):
    if not isinstance(sharding, NamedSharding):
        return sharding, sharding
    specs = component_specs(q, sharding.spec)
    if specs is NotImplemented or not splits_evenly(q, sharding.spec, sharding.mesh):
        return NotImplemented
    return tuple(sharding.update(spec=spec) for spec in specs)


@register_names("sharding_constraint")
def _sharding_constraint(q, *, sharding, **_):
    shardings = _component_shardings(q, sharding)
    if shardings is NotImplemented:
        return NotImplemented
    put = lax.with_sharding_constraint
    return q.replace(
        codes=put(q.codes, shardings[0]), scales=put(q.scales, shardings[1])
    )


@register_names("device_put")
def _device_put(*operands, devices, **_):
    out = []
    for x, where in zip(operands, devices, strict=True):
        if not isinstance(x, QuantizedArray):
            out.append(jax.device_put(x, where))
            continue
        shardings = _component_shardings(x, where)
        if shardings is NotImplemented:
            return NotImplemented
        codes = jax.device_put(x.codes, shardings[0])
        scales = jax.device_put(x.scales, shardings[1])
        out.append(x.replace(codes=codes, scales=scales))
    return out
