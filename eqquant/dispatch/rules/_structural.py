"""Structural primitives, which act on the components and are exact."""

import jax
import jax.numpy as jnp
from jax import lax

from ...arrays import exposed, ImplicitArray, restored, without_origins
from ._registry import register_names, rule_for


@rule_for(lax.transpose_p)
def _transpose(q, *, permutation):
    return q.permute(permutation)


@rule_for(lax.reshape_p)
def _reshape(q, *, new_sizes, dimensions):
    return NotImplemented if dimensions is not None else q.with_shape(new_sizes)


@rule_for(lax.squeeze_p)
def _squeeze(q, *, dimensions):
    return q.squeeze(dimensions)


@rule_for(lax.broadcast_in_dim_p)
def _broadcast_in_dim(q, *dynamic, shape, broadcast_dimensions):
    if dynamic:
        return NotImplemented
    # Batching makes some of them NumPy integers.
    dimensions = [int(axis) for axis in broadcast_dimensions]
    return q.broadcast_in_dim(shape, dimensions)


@rule_for(lax.slice_p)
def _slice(q, *, start_indices, limit_indices, strides):
    return q.slice(start_indices, limit_indices, strides)


@rule_for(lax.split_p)
def _split(q, *, sizes, axis):
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


@rule_for(lax.dynamic_slice_p)
def _dynamic_slice(q, *start, slice_sizes):
    if not isinstance(q, ImplicitArray) or len(start) != q.ndim:
        return NotImplemented
    return q.dynamic_slice(start, slice_sizes)


@rule_for(lax.rev_p)
def _rev(q, *, dimensions):
    return q.reverse(dimensions)


@rule_for(lax.concatenate_p)
def _concatenate(*operands, dimension):
    first = operands[0]
    if not all(isinstance(q, ImplicitArray) for q in operands):
        return NotImplemented
    if len({jax.tree.structure(q) for q in operands}) > 1:
        return NotImplemented
    return first.concatenate(operands[1:], dimension)


@register_names("stack")  # Since JAX 0.10.2; before, `broadcast` and `concatenate`.
def _stack(*operands, axis):
    rows = []
    for q in operands:
        if not isinstance(q, ImplicitArray):
            return NotImplemented
        dimensions = [i for i in range(q.ndim + 1) if i != axis]
        shape = (*q.shape[:axis], 1, *q.shape[axis:])
        rows.append(q.broadcast_in_dim(shape, dimensions))
    return _concatenate(*rows, dimension=axis)


@rule_for(lax.convert_element_type_p)
def _convert_element_type(q, *, new_dtype):
    if not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return q.with_dtype(new_dtype)


@rule_for(lax.select_n_p)
def _select_n(which, *cases):
    if not all(isinstance(q, ImplicitArray) for q in cases) or jnp.ndim(which):
        return NotImplemented
    if len({jax.tree.structure(q) for q in cases}) > 1:
        return NotImplemented
    return jax.tree.map(lambda *parts: lax.select_n(which, *parts), *cases)


@register_names("copy", "copy_p")
def _copy(q):
    return jax.tree.map(jnp.copy, q)


@register_names("stop_gradient")
def _stop_gradient(q):
    return without_origins(_with_stacks(lax.stop_gradient, q))


@rule_for(lax.reduce_precision_p)
def _reduce_precision(q, *, exponent_bits, mantissa_bits):
    """`jax.checkpoint` rounds arrays that it saves to their own dtype."""
    dtype = jnp.finfo(q.dtype)
    is_same = (exponent_bits, mantissa_bits) == (dtype.nexp, dtype.nmant)
    return q if is_same else NotImplemented


@register_names("name")
def _identity(q):
    return q


@register_names("pvary", "pcast")
def _pcast(q, *, axes):
    return _with_stacks(lambda a: lax.pcast(a, axes, to="varying"), q)


def _with_stacks(fn, q):
    """Apply `fn` to each part of an array. A view stays a view, because `fn` is also
    applied to its stack."""
    return restored(jax.tree.map(fn, exposed(q)))


@rule_for(lax.optimization_barrier_p)
def _optimization_barrier(*operands):
    leaves, tree = jax.tree.flatten(list(operands))
    return jax.tree.unflatten(tree, lax.optimization_barrier(leaves))


#
# Placement
#


@register_names("sharding_constraint")
def _sharding_constraint(q, *, sharding):
    shardings = q.shardings(sharding)
    if shardings is NotImplemented:
        return NotImplemented
    return jax.tree.map(lax.with_sharding_constraint, q, shardings)


@register_names("reshard")
def _reshard(q, *, dst_sharding):
    shardings = q.shardings(dst_sharding)
    if shardings is NotImplemented:
        return NotImplemented
    return jax.tree.map(jax.sharding.reshard, q, shardings)


@register_names("device_put")
def _device_put(*operands, devices):
    out = []
    for x, where in zip(operands, devices, strict=True):
        shardings = x.shardings(where) if isinstance(x, ImplicitArray) else where
        if shardings is NotImplemented:
            return NotImplemented
        out.append(jax.device_put(x, shardings))
    return out
