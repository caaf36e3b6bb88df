"""The `quantized_dot` primitive.

Every fast product binds it once. It is linear in the activation and in the scales, and
works on raw arrays. It has rules for batching, differentiation, transposition (into
itself, contracting the other axis), and the lowering on each platform.
"""

import dataclasses
import functools as ft
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int8, UInt8

from .._jax import (
    define_impl,
    explicit_mesh_of,
    match_varying,
    spec_of,
    typed,
    zero_tangent,
)
from ..formats import float_scales, Format, num_codes, problems_of, ShortScales
from ..kernels import Compute, Matmul, View
from ..partition import (
    merge,
    names_of,
    parts_by_type,
    Plan,
    plan_from_types,
    result_type,
    split,
)
from ._activations import straight_rounded
from ._batching import map_first
from ._lowering import dot_by, lowerings, partition_of, PORTABLE
from ._offsets import add_offsets
from ._operands import codes_of, flatten, map_view, unflatten
from ._scale_gradient import scale_gradient, scale_gradient_p, ScaleGradient


quantized_dot_p = Primitive("quantized_dot")


@typed
def quantized_dot(
    x: Float[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"] | ShortScales,
    *,
    format: Format,
    contract_rows: bool = False,
    compute: Compute | None = None,
    weight_dtype=jnp.float32,
    out_dtype=None,
    plan: Plan | None = None,
    offsets: Float[Array, "*batch rows blocks"] | ShortScales | None = None,
    view: View | None = None,
) -> Float[Array, "*batch m out"]:
    """Multiply an activation by a quantized weight, with a JAX primitive.

    `x @ q` calls it for you. The weight is a matrix `w` of shape `(rows, columns)`,
    where `columns` is the stored length of the blocked axis, a multiple of the block
    size. If your axis is shorter, pad the activation with zeros, or drop the tail of
    the result.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nf4")
        x = jax.random.normal(jax.random.key(1), (8, 256))
        y = eqquant.primitives.quantized_dot(x, q.codes, q.scales, format=q.format)
        assert (y == x @ q.T).all()
        ```

    **Arguments:**

    - `x`: the activation, `(*batch, m, columns)`, or `(*batch, m, rows)` when
        contracting rows.
    - `codes`, `scales`: the components of the weight. Native kernels read
        [`eqquant.formats.QuantizedScales`][] and other short scales as they are stored.
    - `format`: the format of both.
    - `contract_rows`: compute `x @ w` rather than `x @ w.T`.
    - `compute`: an [`eqquant.kernels.Compute`][].
    - `weight_dtype`: the dtype of the dequantized weight.
    - `out_dtype`: the dtype of the result. By default, the promoted dtype of the
        operands.
    - `plan`: the split of the weight over a mesh, from [`eqquant.shard_tree`][]. On a
        mesh with explicit axes, only its request for the result is used.
    - `offsets`: like `scales`, for an affine format. Without them, the result has no
        part of the offsets.
    - `view`: the stack from which the components were sliced. Kernels then read the
        stack in place, and the compiler drops the slices.

    **Returns:**

    An array of shape `(*batch, m, rows)`, or `(*batch, m, columns)`.
    """
    if out_dtype is None:
        out_dtype = jnp.promote_types(x.dtype, weight_dtype)
    compute = Compute() if compute is None else compute
    format, shift = (format, 0) if offsets is None else format.centred
    matmul = Matmul(format, contract_rows, compute, weight_dtype, out_dtype, shift)
    if plan is None and not (explicit_mesh_of(codes) or explicit_mesh_of(x)):
        return _bind(x, codes, (scales, offsets), view, matmul, plan)
    # A plan splits scales with one number per block.
    scales = float_scales(scales)
    if offsets is None:
        return _bind(x, codes, (scales, None), view, matmul, plan)
    out = _bind(x, codes, (scales, None), view, matmul.wide, plan)
    return add_offsets(out, x, scales, offsets, matmul)


def _bind(
    x, codes, numbers: tuple, view: View | None, matmul: Matmul, plan: Plan | None
):
    """Bind the primitive. `numbers` are scales, and offsets or None."""
    operands, stored = flatten(codes, numbers, view)
    args = match_varying(x, *operands)
    return quantized_dot_p.bind(*args, matmul=matmul, plan=plan, stored=stored)


def _uncompiled(x, codes, *parts, matmul: Matmul, plan: Plan | None, stored):
    del plan
    numbers, view = unflatten(codes, parts, stored)
    return dot_by(PORTABLE)(x, codes, *numbers, view, matmul=matmul)


define_impl(quantized_dot_p, _uncompiled)


@quantized_dot_p.def_abstract_eval
def _abstract_eval(x, codes, *parts, matmul: Matmul, plan: Plan | None, stored):
    (scales, given), view = unflatten(codes, parts, stored)
    stack, codes = codes, codes_of(codes, view)
    if given is not None and given.shape != scales.shape:
        raise TypeError(
            f"quantized_dot: offsets must have the shape {scales.shape} of scales, "
            f"got {given.shape}."
        )
    if isinstance(scales, ShortScales):
        scales = jax.ShapeDtypeStruct(scales.shape, scales.dtype)
    format, contract_rows = matmul.format, matmul.contract_rows
    *batch, rows, packed = codes.shape
    columns = num_codes(packed, format.bits)
    contracted, free = (rows, columns) if contract_rows else (columns, rows)
    if x.shape[:-2] != tuple(batch) or x.shape[-1] != contracted:
        raise TypeError(
            f"quantized_dot: x must have the shape {(*batch, None, contracted)} for "
            f"codes of shape {codes.shape} in {format!r} with "
            f"contract_rows={contract_rows}, got {x.shape}."
        )
    # Offsets may be left to the caller, so scales are checked in their place.
    offsets = scales if format.has_offsets else None
    for problem in problems_of(
        format, codes, scales, offsets, exact=False, joined=True
    ):
        raise TypeError(f"quantized_dot: {problem}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantized_dot: x must be floating point, got {x.dtype}.")
    plan = plan_from_types(x, stack, asked=plan)
    partition = plan and partition_of(matmul, plan, x, codes, scales)
    return result_type(x, codes, (*x.shape[:-1], free), matmul.out_dtype, partition)


for _platform, _rule in lowerings.items():
    mlir.register_lowering(quantized_dot_p, _rule, platform=_platform)


def _jvp(primals, tangents, *, matmul: Matmul, plan: Plan | None, stored):
    x, codes, *parts = primals
    x_dot, _, *parts_dot = tangents
    numbers, view = unflatten(codes, parts, stored)
    out = _bind(x, codes, numbers, view, matmul, plan)
    terms = []
    if type(x_dot) is not ad.Zero:
        # The derivative of rounding activations is the identity.
        unrounded = matmul.with_compute(activations="float")
        terms.append(_bind(x_dot, codes, numbers, view, unrounded, plan))
    # Tangents of the numbers of a stack are zero: those of its slices are not.
    own, of_own = jax.tree.flatten(numbers)
    parts_dot = parts_dot[: len(own)]
    if not all(map(_is_zero, parts_dot)):
        is_short = lambda a: isinstance(a, ShortScales)
        decoded = lambda *parts: jax.tree.map(
            float_scales, of_own.unflatten(parts), is_leaf=is_short
        )
        parts_dot = tuple(map(_instantiated, own, parts_dot))
        _, (scales_dot, offsets_dot) = jax.jvp(decoded, tuple(own), parts_dot)
        view = None if view is None else View(view.index, view.codes)
        if offsets_dot is None:
            terms.append(_bind(x, codes, (scales_dot, None), view, matmul, plan))
        else:
            term = _bind(x, codes, (scales_dot, None), view, matmul.wide, plan)
            terms.append(add_offsets(term, x, scales_dot, offsets_dot, matmul))
    if not terms:
        return out, zero_tangent(out)
    return out, ft.reduce(operator.add, terms)


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero or tangent.dtype == float0


def _instantiated(part, tangent):
    if not _is_zero(tangent):
        return tangent
    if jnp.issubdtype(part.dtype, jnp.floating):
        return jnp.zeros(part.shape, part.dtype)
    return np.zeros(part.shape, float0)


ad.primitive_jvps[quantized_dot_p] = _jvp


def _transpose(ct, x, codes, *parts, matmul: Matmul, plan: Plan | None, stored):
    if ad.is_undefined_primal(x):
        nothing = [None] * (1 + len(parts))
        if type(ct) is ad.Zero:
            return ad.Zero(x.aval), *nothing
        back = dataclasses.replace(
            matmul.with_compute(activations="float"),
            contract_rows=not matmul.contract_rows,
            out_dtype=x.aval.dtype,
        )
        numbers, view = unflatten(codes, parts, stored)
        plan = _plan_back(x.aval, codes, plan)
        out = _bind(ct, codes, numbers, view, back, plan)
        return _typed_as(out, x.aval), *nothing
    # The derivative for scales binds floats without offsets.
    scales, *index = parts
    nothing = [None] * len(index)
    if type(ct) is ad.Zero:
        return None, None, ad.Zero(scales.aval), *nothing
    if index:
        codes = View(index[0], codes).take(codes)
    if matmul.compute.activations == "int8":
        x = straight_rounded(x, (x.ndim - 1,))
    over_rows, over_columns = (x, ct) if matmul.contract_rows else (ct, x)
    scales = scales.aval
    gradient = ScaleGradient(matmul.format, scales.shape[-1], scales.dtype)
    out = scale_gradient(over_rows, over_columns, codes, gradient, plan)
    return None, None, _typed_as(out, scales), *nothing


def _transpose_scale_gradient(
    ct, rows, columns, codes, *, gradient: ScaleGradient, plan: Plan | None
):
    """The gradient for a factor is a product with a weight whose scales are `ct`."""
    by_rows = ad.is_undefined_primal(columns)
    aval = (columns if by_rows else rows).aval
    out = ad.Zero(aval)
    if type(ct) is not ad.Zero:
        matmul = Matmul(
            gradient.format, by_rows, Compute("highest"), out_dtype=aval.dtype
        )
        x = rows if by_rows else columns
        plan = _plan_back(aval, codes, plan)
        out = _typed_as(_bind(x, codes, (ct, None), None, matmul, plan), aval)
    return (None, out, None) if by_rows else (out, None, None)


ad.primitive_transposes[scale_gradient_p] = _transpose_scale_gradient


def _plan_back(x, codes, plan: Plan | None) -> Plan | None:
    """Return the plan of the product for the cotangent of an activation `x`: by the
    same rows, and with a result that is split like `x`."""
    by_types = plan_from_types(x, codes, asked=plan)
    if by_types is None:
        return plan
    rows, columns = map(names_of, spec_of(x)[-2:])
    return dataclasses.replace(by_types, scatter=(rows, columns))


def _typed_as(x, aval):
    """Reshard to the sharding of a type, on a mesh with explicit axes."""
    if explicit_mesh_of(x) is None or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding.spec)


ad.primitive_transposes[quantized_dot_p] = _transpose


def _batch(args, dims, *, matmul: Matmul, plan: Plan | None, stored):
    x, codes, *parts = args
    x_dim, codes_dim, *parts_dims = dims
    if codes_dim is None and set(parts_dims) == {None}:
        numbers, view = unflatten(codes, parts, stored)
        # Several activations for one weight are more rows of one product.
        x = jnp.moveaxis(x, x_dim, -3)
        ones = [1] * (x.ndim - 3)
        parts = parts_by_type(x)
        if plan is not None and plan.mesh == explicit_mesh_of(x):
            batch = *parts.names[-3], *plan.batch
            plan = dataclasses.replace(plan, batch=batch)
            # Keep rows together if the result is scattered over them.
            scattered = parts.split_further(-2, plan.scatter[0], plan.mesh)
            if x.shape[-2] % scattered.counts[-2] == 0:
                parts = scattered
        rows = merge(x, [*ones, 2, 1], parts)
        out = _bind(rows, codes, numbers, view, matmul, plan)
        shapes = [[size] for size in out.shape]
        shapes[-2] = list(x.shape[-3:-1])
        return split(out, shapes, parts), len(ones)

    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)

    numbers, view = unflatten(codes, parts, stored)
    parts, of_numbers = jax.tree.flatten(numbers)
    to_front = ft.partial(map_first, size)
    numbers = of_numbers.unflatten(map(to_front, parts, parts_dims))
    if view is not None:
        of_index, *of_stack = parts_dims[len(parts) :]
        joined = map_view(size, view, (of_index, codes_dim, *of_stack))
        if joined is not None:
            return _bind(to_front(x, x_dim), codes, numbers, joined, matmul, plan), 0
        index = view.index
        if codes_dim is None:
            index, of_index = to_front(index, of_index), 0
        take = lambda i, a: View(i, a).take(a)
        codes, codes_dim = jax.vmap(take, (of_index, codes_dim))(index, codes), 0
    codes = to_front(codes, codes_dim)
    if x_dim is None and not matmul.contract_rows and _merges(plan, codes):
        # Several weights for one activation are more rows of one weight.
        batch = x.ndim - 2

        def to_rows(a):
            a = jnp.moveaxis(a, 0, batch)
            return a.reshape(*a.shape[:batch], -1, a.shape[-1])

        if plan is not None:
            order = *range(1, batch + 1), 0, batch + 1, batch + 2
            moved = [codes.shape[i] for i in order]
            merged = *moved[:batch], moved[-3] * moved[-2], moved[-1]
            plan = plan.permuted(order).reshaped(moved, merged)
        numbers = jax.tree.map(to_rows, numbers)
        out = _bind(x, to_rows(codes), numbers, None, matmul, plan)
        return out.reshape(*out.shape[:-1], size, -1), out.ndim - 1
    return _bind(to_front(x, x_dim), codes, numbers, None, matmul, plan), 0


def _merges(plan: Plan | None, codes) -> bool:
    """Return whether a stack of weights can become rows of one weight.

    If rows are split, each device has a part of every weight, which rules this out.
    """
    if explicit_mesh_of(codes) is not None:
        return False
    return plan is None or not plan.of(codes.ndim)[-2]


batching.primitive_batchers[quantized_dot_p] = _batch
