"""The rule of a product, and all specs and collectives that follow from it.

The compiler cannot partition a kernel. So a lowering runs its product on every device,
inside of `shard_map`. A rule names the roles of the axes of a product, and a plan names
the mesh axes that split them.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from .._jax import manual_axes_in_context, parts_of, spec_of, wide_dtype
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

    - `in_specs`: the spec of each operand before it is gathered.
    - `gathers`: the mesh axes over which each axis of each operand is gathered.
    - `whole_specs`: the spec of each gathered operand.
    - `over`: the mesh axes over which the product is summed.
    - `scatter`: the mesh axes of the sum that split each axis of the result.
    - `out_spec`: the spec of the result.
    """

    mesh: AbstractMesh
    in_specs: tuple[PartitionSpec, ...]
    gathers: tuple[tuple[Names, ...], ...]
    whole_specs: tuple[PartitionSpec, ...]
    over: Names
    scatter: tuple[Names, ...]
    out_spec: PartitionSpec

    @property
    def all_reduced(self) -> Names:
        """The mesh axes over which every device has the sum."""
        return _without(self.over, sum(self.scatter, ()))

    def parts(self, *operands: Any) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the gathered operands on each device."""

        def part(x, spec):
            counts = (parts_of(self.mesh, entry) for entry in spec)
            shape = tuple(map(operator.floordiv, x.shape, counts))
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return list(map(part, operands, self.whole_specs))

    def describe(self) -> str:
        """Describe the collectives."""
        text = f", on each of {self.mesh.size} devices"
        gathered = (name for axes in self.gathers for name in sum(axes, ()))
        for names, what in (
            (dict.fromkeys(gathered), "codes and scales gathered over {} before"),
            (sum(self.scatter, ()), "results summed and scattered over {} after"),
            (self.all_reduced, "results summed over {} after"),
        ):
            text += f", {what.format(', '.join(names))}" if names else ""
        return text

    def sharded(
        self, fn: Callable, out_dtype: Any, round_parts: bool = False
    ) -> Callable:
        """Run `fn(*operands, dtype)` on the gathered parts of each device, and sum the
        results in at least float32.

        With `round_parts`, parts are rounded to `out_dtype` and summed in it, unless
        the sum is scattered.
        """
        dtype = wide_dtype(out_dtype) if self.over else out_dtype
        if round_parts and not any(self.scatter):
            dtype = out_dtype

        def gather(part, gathers):
            for axis, names in enumerate(gathers):
                if names:
                    part = lax.all_gather(part, names, axis=axis, tiled=True)
            return part

        def local(*operands):
            out = fn(*map(gather, operands, self.gathers), dtype)
            for i, names in enumerate(self.scatter):
                if names:
                    out = lax.psum_scatter(out, names, scatter_dimension=i, tiled=True)
            out = lax.psum(out, self.all_reduced) if self.all_reduced else out
            return out.astype(out_dtype)

        return on_shards(local, self.mesh, self.in_specs, self.out_spec)


def _without(names: Names, others: Collection[str]) -> Names:
    return tuple(name for name in names if name not in others)


def _spec(axes: Iterable[Names]) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in axes))


def derive(
    rule: Rule,
    mesh: AbstractMesh,
    names: Mapping[Role, Names],
    out_shape: Sequence[int],
    requested: Mapping[Role, Names] | None = None,
    ready: Collection[int] = (),
) -> Partition:
    """Return the partition of a product.

    **Arguments:**

    - `names`: the mesh axes that split each role.
    - `out_shape`: the shape of the result.
    - `requested`: the mesh axes over which to scatter each role of the result, if the
        result is summed over them and the parts are equal. By default, a result without
        leading role is stored like the operands.
    - `ready`: the operands that arrive gathered.
    """
    leading = {name for role in rule.leading for name in names[role]}
    kept = {
        role: axes if role in rule.leading else _without(axes, leading)
        for role, axes in names.items()
    }
    gathered = {role: _without(axes, kept[role]) for role, axes in names.items()}
    gathers = tuple(
        tuple(() if i in ready or "tokens" in roles else gathered[r] for r in roles)
        for i, roles in enumerate(rule.operands)
    )
    wholes = [[kept[role] for role in roles] for roles in rule.operands]
    # Gathered mesh axes are last, so that neighbours stay together.
    ins = (map(operator.add, *axes) for axes in zip(wholes, gathers, strict=True))

    summed = (role for roles in rule.operands for role in roles if role not in rule.out)
    over = tuple(dict.fromkeys(name for role in summed for name in kept[role]))
    scatter, remaining = [], over
    for role, size in zip(rule.out, out_shape, strict=True):
        wanted = (gathered if requested is None else requested).get(role, ())
        found = tuple(name for name in wanted if name in remaining)
        while found and size % parts_of(mesh, (*kept[role], *found)):
            found = found[:-1]
        scatter.append(found)
        remaining = _without(remaining, found)
    out = map(operator.add, (kept[role] for role in rule.out), scatter)
    in_specs, whole_specs = tuple(map(_spec, ins)), tuple(map(_spec, wholes))
    return Partition(
        mesh, in_specs, gathers, whole_specs, over, tuple(scatter), _spec(out)
    )


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
    groups, blocks = packed // group if packed % group == 0 else 1, sizes["blocks"]
    # A role can be split into any number of parts that divides its size.
    sizes |= {**dict(enumerate(stack)), "rows": rows}
    sizes["columns"] = groups if blocks == 1 else math.gcd(groups, blocks)

    used = set(manual_axes_in_context())
    names: dict[Role, Names] = {"blocks": ()}

    def assign(role: Role, wanted: Names) -> None:
        found = _without(wanted, used)
        while found and sizes[role] % parts_of(plan.mesh, found):
            found = found[:-1]
        used.update(found)
        names[role] = found

    *of_stack, of_rows, of_columns = plan.of(len(stack) + 2)
    for i, wanted in enumerate(of_stack):
        assign(i, wanted)
    in_stack = set(used)
    assign("rows", of_rows)
    assign("columns", of_columns)
    used = in_stack
    assign("tokens", plan.batch)

    requested = None
    if "tokens" in rule.out:
        requested = dict(zip(rule.out, plan.scatter, strict=True))
    scales = [i for i, roles in enumerate(rule.operands) if roles == SCALES]
    ready = scales if plan.whole_scales else ()
    rule = rule.stacked(len(stack), blocks)
    return derive(rule, plan.mesh, names, out_shape, requested, ready)


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
