"""How a mesh splits arrays in parts, and their products.

This is the only file in this folder that uses plans and meshes.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import explicit_mesh_of, manual_axes_in_context, parts_of
from ..formats import float_scales
from ..partition import all_gather_scales, Parts, parts_by_type, Plan, request
from ..primitives import quantized_dot
from ._axes import Operation


def hint_for_parts() -> str:
    """Return a hint for an error about sizes: inside of `shard_map`, arrays are
    parts."""
    if not manual_axes_in_context():
        return ""
    return (
        " Inside of shard_map the contracted axis can be in parts only if they are "
        "equal, and have whole blocks: eqquant.shard_tree says what fits."
    )


class Partitioned(eqx.Module):
    """The split of an array in parts over a mesh."""

    @abc.abstractmethod
    def dequantize(self) -> Any: ...

    def can_split(self, axis: int, parts: int) -> bool:
        """Return whether an axis can be cut into `parts` equal parts. The parts of the
        array that are implicit arrays are checked separately."""
        del axis, parts
        return True

    def can_join(self, axis: int) -> bool:
        """Return whether arrays of this structure can be concatenated along an axis,
        part by part."""
        return axis not in self.blocked_axes  # pyright: ignore

    def split_specs(self: Any, spec: PartitionSpec, mesh) -> Any:
        """Return a tree of the same structure with a `PartitionSpec` for each part,
        which split the parts over the mesh as `spec` splits the array. Return
        `NotImplemented` if the parts cannot be split like this."""
        return self._specs(spec, mesh, lambda x, axis, n: x.can_split(axis, n))

    def join_specs(self: Any, spec: PartitionSpec, mesh) -> Any:
        """As [`split_specs`][], if this array is the part on one device."""
        return self._specs(spec, mesh, lambda x, axis, n: n == 1 or x.can_join(axis))

    def _specs(self: Any, spec: PartitionSpec, mesh, can: Callable) -> Any:
        """Return the specs of the parts if `can(array, axis, count)` for each axis and
        the number of its parts."""
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        counts = [parts_of(mesh, names) for names in entries]
        if not all(can(self, i, n) for i, n in enumerate(counts)):
            return NotImplemented
        axes, specs = self.axes_of_parts(self.ndim, self.groups), []
        entry_of = lambda axis: entries[axis] if isinstance(axis, int) else None

        def spec_of_leaf(axes, leaf) -> PartitionSpec:
            # Storage is split like the first blocked axis, but not the scales of rows.
            whole = not self.blocked_axes or leaf.shape[-1:] == (1,)
            storage = None if whole else entries[self.blocked_axes[0]]
            return PartitionSpec(*(storage if i is ... else entry_of(i) for i in axes))

        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            if isinstance(part, Partitioned):
                on_part = spec
                if ... not in axes[field.name]:
                    on_part = PartitionSpec(*map(entry_of, axes[field.name]))
                part = part._specs(on_part, mesh, can)
                if part is NotImplemented:
                    return NotImplemented
                specs += jax.tree.leaves(part)
            elif part is not None and field.name in axes:
                for leaf in jax.tree.leaves(part):
                    specs.append(spec_of_leaf(axes[field.name], leaf))
        return jax.tree.unflatten(jax.tree.structure(self), specs)

    def shardings(self, sharding: Any) -> Any:
        """Return a tree with the sharding of each part, or `NotImplemented`."""
        if not isinstance(sharding, NamedSharding):
            return jax.tree.map(lambda _: sharding, self)
        specs = self.split_specs(sharding.spec, sharding.mesh)
        if specs is NotImplemented:
            return NotImplemented
        return jax.tree.map(lambda spec: sharding.update(spec=spec), specs)

    def struct(self: Any) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of the dequantized array."""
        if jax.sharding.get_abstract_mesh().empty:
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        # The varying axes and the sharding follow from the components.
        return jax.eval_shape(lambda q: q.dequantize(), self)


class PartitionedCodes(Partitioned):
    """An array of codes with a plan, which structural operations move with the
    codes."""

    plan: Plan | None = eqx.field(
        static=True, default=None, kw_only=True, metadata={"saved": False}
    )

    def with_plan(self: Any, plan: Plan | None) -> Any:
        return self.with_static(plan=plan)

    def move(self: Any, operation: Operation) -> Any:
        out = super().move(operation)  # pyright: ignore
        if self.plan is None or out is NotImplemented:
            return out
        old, new = (q.axes_of_parts(q.ndim, q.groups)["codes"] for q in (self, out))
        places = operation.places(old, new)
        return out.with_plan(self.plan.picked(len(old), places))

    def split_like(self: Any, other: "PartitionedCodes", shape, order) -> Any:
        """Return this array, whose codes are the codes of `other`, reshaped to `shape`
        and permuted by `order`."""
        if other.plan is None:
            return self
        plan = other.plan.reshaped(other.codes.shape, shape)  # pyright: ignore
        return self.with_plan(plan.permuted(order))

    def split_product(
        self: Any, g: Any, codes, x, out_sharding: PartitionSpec | None
    ) -> "SplitProduct":
        """Return the split of a product of permuted codes and a permuted activation."""
        weight, of_x = parts_by_type(codes), parts_by_type(x)
        if g.columns:
            weight = weight.with_whole_blocks(self.scales.shape[-1])
        stack = len(g.stack)
        plan, lead = self.plan, weight[:stack] + of_x[stack : g.num_lead]
        mesh = explicit_mesh_of(codes) or explicit_mesh_of(x)
        if out_sharding is not None and mesh is not None:
            plan, lead, weight = request(mesh, out_sharding, g, lead, weight)
        return SplitProduct(plan, lead, weight, codes.shape)


@dataclasses.dataclass(frozen=True)
class SplitProduct:
    """The split of one product.

    **Fields:**

    - `plan`: the plan of the codes, before they are permuted.
    - `lead`: the parts of the stack and the tokens.
    - `weight`: the parts of the permuted axes of the codes.
    - `shape`: the shape of the permuted codes.
    """

    plan: Plan | None
    lead: Parts
    weight: Parts
    shape: tuple[int, ...]

    def gather(self, scales: Any, x, stack: int) -> tuple[Any, "SplitProduct"]:
        """Gather quantized scales while they are small."""
        scales, plan = all_gather_scales(scales, self.plan, x, stack)
        parts = x, *jax.tree.leaves(scales)
        if plan is not None or any(explicit_mesh_of(part) for part in parts):
            # Scales with one number per block can be split.
            scales = tuple(s if s is None else float_scales(s) for s in scales)
        return scales, dataclasses.replace(self, plan=plan)

    def dot(self, g: Any, x, codes, scales, **kwargs):
        """Multiply the merged operands."""
        plan = self.plan
        if plan is not None:
            plan = plan.permuted(g.weight_order).reshaped(self.shape, codes.shape)
        return quantized_dot(x, codes, scales, plan=plan, **kwargs)
