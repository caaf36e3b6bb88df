"""The rule of a product, and all specs and collectives that follow from it.

The compiler cannot partition a kernel. So a lowering runs its product on every device,
inside of `shard_map`. A rule names the roles of the axes of a product, and a plan names
the mesh axes that split them.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from .._jax import manual_axes_in_context, parts_of, spec_of
from ._plan import Names, Plan


Role = str | int
Roles = tuple[Role, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The roles of the axes of a product.

    Axes of one role are split alike. The product is summed over the roles that its
    result lacks. A mesh axis that splits a leading role splits no other role during the
    product: operands without leading role are gathered over it.

    **Fields:**

    - `operands`: the roles of the axes of each operand.
    - `out`: the roles of the axes of the result.
    - `leading`: the roles of tokens and of a stack.
    """

    operands: tuple[Roles, ...]
    out: Roles
    leading: Roles = ("tokens",)

    def stacked(self, ndim: int, blocks: int) -> "Rule":
        """Return the rule with `ndim` axes of a stack in front, for scales with
        `blocks` blocks per row. A single block is replicated."""
        stack = tuple(range(ndim))
        role = lambda name: "columns" if name == "blocks" and blocks != 1 else name
        on = lambda roles: (*stack, *map(role, roles))
        return Rule(tuple(map(on, self.operands)), on(self.out), on(self.leading))


CODES = ("rows", "columns")
SCALES = ("rows", "blocks")
# x, codes, scales.
DOT = Rule((("tokens", "columns"), CODES, SCALES), ("tokens", "rows"))
DOT_OVER_ROWS = Rule((("tokens", "rows"), CODES, SCALES), ("tokens", "columns"))
# The factor over the rows, the factor over the columns, codes.
SCALE_GRADIENT = Rule((("tokens", "rows"), ("tokens", "columns"), CODES), SCALES)


@dataclasses.dataclass(frozen=True)
class Partition:
    """The partition of one product over a mesh.

    **Fields:**

    - `names`: the mesh axes that split each role.
    - `requested`: the mesh axes over which to scatter each axis of the result, if the
        result is summed over them and the parts are equal.
    - `ready`: the operands that arrive gathered.
    """

    mesh: AbstractMesh
    rule: Rule
    names: Mapping[Role, Names]
    shapes: Sequence[Sequence[int]] = ()
    out_shape: Sequence[int] = ()
    requested: Mapping[Role, Names] = dataclasses.field(default_factory=dict)
    ready: frozenset[int] = frozenset()

    @ft.cached_property
    def leading(self) -> frozenset[str]:
        """The mesh axes that split a leading role."""
        return frozenset(n for role in self.rule.leading for n in self.names[role])

    def kept(self, role: Role) -> Names:
        """Return the mesh axes that split a role during the product."""
        if role in self.rule.leading:
            return self.names[role]
        names = self.names.get(role, ())
        return tuple(name for name in names if name not in self.leading)

    def gathered(self, role: Role) -> Names:
        """Return the mesh axes over which operands are gathered before the product."""
        names, kept = self.names.get(role, ()), self.kept(role)
        return tuple(name for name in names if name not in kept)

    def _gathers(self, operand: int) -> list[Names]:
        """Return the mesh axes over which each axis of an operand is gathered."""
        roles = self.rule.operands[operand]
        whole = operand in self.ready or "tokens" in roles
        return [() if whole else self.gathered(role) for role in roles]

    @property
    def in_specs(self) -> tuple[PartitionSpec, ...]:
        """The spec of each operand before it is gathered."""
        # Gathered mesh axes are last, so that neighbours stay together.
        return tuple(
            spec_by(
                (*self.kept(role), *names)
                for role, names in zip(roles, self._gathers(i), strict=True)
            )
            for i, roles in enumerate(self.rule.operands)
        )

    def whole_spec(self, roles: Roles) -> PartitionSpec:
        """Return the spec of an operand during the product."""
        return spec_by(map(self.kept, roles))

    @property
    def over(self) -> Names:
        """The mesh axes over which the product is summed."""
        roles = dict.fromkeys(role for roles in self.rule.operands for role in roles)
        summed = (self.kept(role) for role in roles if role not in self.rule.out)
        return tuple(dict.fromkeys(sum(summed, ())))

    @ft.cached_property
    def scatter(self) -> dict[Role, Names]:
        """The mesh axes over which the sum is scattered along each role of the
        result."""
        remaining, found = self.over, {}
        for role, size in zip(self.rule.out, self.out_shape, strict=False):
            names = self.requested.get(role, ())
            names = tuple(name for name in names if name in remaining)
            while names and size % parts_of(self.mesh, (*self.kept(role), *names)):
                names = names[:-1]
            found[role] = names
            remaining = tuple(name for name in remaining if name not in names)
        return found

    @property
    def all_reduced(self) -> Names:
        """The mesh axes over which every device has the sum."""
        scattered = {name for names in self.scatter.values() for name in names}
        return tuple(name for name in self.over if name not in scattered)

    @property
    def out_spec(self) -> PartitionSpec:
        """The spec of the result."""
        return spec_by(
            (*self.kept(role), *self.scatter.get(role, ())) for role in self.rule.out
        )

    def _part(self, shape: Sequence[int], roles: Roles) -> tuple[int, ...]:
        parts = (parts_of(self.mesh, self.kept(role)) for role in roles)
        return tuple(n // k for n, k in zip(shape, parts, strict=True))

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The shapes of the gathered operands on each device."""
        return list(map(self._part, self.shapes, self.rule.operands))

    @property
    def out_part(self) -> tuple[int, ...]:
        """The shape of the result on each device, before it is scattered."""
        return self._part(self.out_shape, self.rule.out)

    def describe(self) -> str:
        """Describe the collectives."""
        text = f", on each of {self.mesh.size} devices"
        gathered = (self.gathered(role) for role in CODES)
        if names := sum(gathered, ()):
            text += f", codes and scales gathered over {', '.join(names)} before"
        if names := sum(self.scatter.values(), ()):
            text += f", results summed and scattered over {', '.join(names)} after"
        if names := self.all_reduced:
            text += f", results summed over {', '.join(names)} after"
        return text

    def sharded(self, fn: Callable, out_dtype: Any) -> Callable:
        """Run `fn(*operands, dtype)` on the gathered parts of each device, and sum the
        results in at least float32."""
        dtype = jnp.promote_types(out_dtype, jnp.float32) if self.over else out_dtype

        def local(*operands):
            parts = []
            for i, part in enumerate(operands):
                for axis, names in enumerate(self._gathers(i)):
                    if names:
                        part = lax.all_gather(part, names, axis=axis, tiled=True)
                parts.append(part)
            out = fn(*parts, dtype)
            for axis, names in enumerate(self.scatter.values()):
                if names:
                    out = lax.psum_scatter(
                        out, names, scatter_dimension=axis, tiled=True
                    )
            out = lax.psum(out, self.all_reduced) if self.all_reduced else out
            return out.astype(out_dtype)

        return on_shards(local, self.mesh, self.in_specs, self.out_spec)


def spec_by(axes) -> PartitionSpec:
    """Return the spec of an array, from the mesh axes of each of its axes."""
    return PartitionSpec(*(tuple(names) or None for names in axes))


def partition_product(
    rule: Rule,
    plan: Plan,
    shapes: Sequence[Sequence[int]],
    out_shape: Sequence[int],
    group: int,
) -> Partition:
    """Return the partition of a product with a quantized weight.

    It contains only mesh axes of the plan that divide the shapes, each at most once.

    **Arguments:**

    - `shapes`, `out_shape`: the shapes of the operands and of the result.
    - `group`: the number of bytes of codes that stay together.
    """
    *stack, rows, packed = shapes[rule.operands.index(CODES)]
    sizes: dict[Role, int] = {}
    arrays = zip((*rule.operands, rule.out), (*shapes, out_shape), strict=True)
    for roles, shape in arrays:
        sizes.update(zip(roles, shape[-2:], strict=True))
    ready = {i for i, roles in enumerate(rule.operands) if roles == SCALES}
    rule = rule.stacked(len(stack), blocks := sizes["blocks"])
    groups = packed // group if packed % group == 0 else 1
    # A role can be split into any divisor of these numbers.
    sizes |= {**dict(enumerate(stack)), "rows": rows}
    sizes["columns"] = groups if blocks == 1 else math.gcd(groups, blocks)

    used = set(manual_axes_in_context())

    def fitting(role: Role, names: Sequence[str]) -> Names:
        names = [name for name in names if name not in used]
        while names and sizes[role] % parts_of(plan.mesh, tuple(names)):
            names.pop()
        used.update(names)
        return tuple(names)

    roles = [*range(len(stack)), *CODES]
    planned = dict(zip(roles, plan.of(len(roles)), strict=True))
    names = {role: fitting(role, planned[role]) for role in range(len(stack))}
    in_stack = frozenset(used)
    names |= {role: fitting(role, planned[role]) for role in CODES}
    used = set(in_stack)
    names["tokens"] = fitting("tokens", plan.batch)

    partition = Partition(plan.mesh, rule, names, shapes, out_shape)
    requested = {role: partition.gathered(role) for role in CODES}
    if "tokens" in rule.out:
        requested = dict(zip(rule.out[-2:], plan.scatter, strict=True))
    ready = frozenset(ready if plan.whole_scales else ())
    return dataclasses.replace(partition, requested=requested, ready=ready)


def on_shards(local: Callable, mesh: Any, in_specs: tuple, out_specs) -> Callable:
    """Run `local` on every device of a mesh."""
    manual = manual_axes_in_context()

    def call(*args):
        now, free = mesh, set(mesh.axis_names)
        if manual:  # Inside of a `shard_map` over other mesh axes.
            now = jax.sharding.get_abstract_mesh()
            free = set(now.axis_names) - manual
        with jax.sharding.use_abstract_mesh(now):
            if AxisType.Explicit in now.axis_types:
                # The compiler does not read types. Without this, it would shard the
                # carry of a loop like its products.
                own = (PartitionSpec(*spec_of(x)) for x in args)
                for specs in (own, in_specs):
                    args = tuple(map(jax.sharding.reshard, args, specs))
            fn = jax.shard_map(
                local,
                mesh=now,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=free,
                check_vma=False,
            )
            return fn(*args)

    return call
