"""Products over a mesh: a kernel on every device, inside of `shard_map`.

The compiler cannot partition a kernel. So the lowering of a product splits it by a
[`Plan`][]. On meshes with explicit axes, the plan follows from the types of the
operands.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

from .._jax import (
    explicit_mesh_of,
    has_explicit_axes,
    manual_axes_in_context,
    num_devices,
    parts_of,
    spec_of,
    warn,
)
from ..formats import Format, num_bytes, num_codes
from ..kernels import Matmul
from ._plan import Names, names_of, Plan


@dataclasses.dataclass(frozen=True)
class Layout:
    """A plan for the shapes of one product.

    It contains only mesh axes that divide the shapes, each at most once. `gathered` are
    the mesh axes that also split the activation by tokens.
    """

    stack: tuple[Names, ...]
    batch: Names
    rows: Names
    columns: Names
    gathered: frozenset[str]

    def _entry(self, names: Names) -> Names | None:
        return tuple(names) or None

    def kept(self, names: Names) -> Names:
        return tuple(name for name in names if name not in self.gathered)

    def gathers(self, names: Names) -> Names:
        return tuple(name for name in names if name in self.gathered)

    def _spec(self, *last: Names) -> PartitionSpec:
        return PartitionSpec(*map(self._entry, (*self.stack, *last)))

    def contracted(self, contract_rows: bool) -> Names:
        """Return the mesh axes over which the product is summed."""
        return self.kept(self.rows if contract_rows else self.columns)

    def of_factor(self, names: Names) -> PartitionSpec:
        """Return the spec of an operand with one row per token."""
        return self._spec(self.batch, self.kept(names))

    def of_x(self, contract_rows: bool) -> PartitionSpec:
        return self.of_factor(self.rows if contract_rows else self.columns)

    def of_weight(self, blocks: int | None = None) -> PartitionSpec:
        """Return the spec of codes, or of scales with `blocks` blocks per row. A single
        block is replicated."""
        # Gathered mesh axes are last, so that neighbours stay together.
        rows, columns = (
            (*self.kept(names), *self.gathers(names))
            for names in (self.rows, self.columns)
        )
        return self._spec(rows, () if blocks == 1 else columns)

    @property
    def whole(self) -> "Layout":
        """The layout after the all-gather."""
        rows, columns = self.kept(self.rows), self.kept(self.columns)
        return dataclasses.replace(self, rows=rows, columns=columns)

    def of_sum(
        self, plan: Plan, x, codes, format: Format, contract_rows: bool
    ) -> tuple[tuple[Names, Names], PartitionSpec]:
        """Return the mesh axes of the reduce-scatter of rows and of columns, and the
        spec of the result. Sizes that are not divisible are not scattered."""
        free, names = codes.shape[-2], self.rows
        if contract_rows:
            free, names = num_codes(codes.shape[-1], format.bits), self.columns
        left = self.contracted(contract_rows)

        def fitting(size: int, split: Names, wanted: Names) -> Names:
            found = tuple(name for name in wanted if name in left)
            while found and size % parts_of(plan.mesh, (*split, *found)):
                found = found[:-1]
            return found

        split = self.batch, self.kept(names)
        rows = fitting(x.shape[-2], split[0], plan.scatter[0])
        left = tuple(name for name in left if name not in rows)
        columns = fitting(free, split[1], plan.scatter[1])
        spec = self._spec((*split[0], *rows), (*split[1], *columns))
        return (rows, columns), spec


def layout_of(plan: Plan, x, codes, scales, format: Format) -> Layout:
    """Return the layout of a product. Only the shapes of the operands are read."""
    manual = manual_axes_in_context()
    used = set(manual)
    sizes = plan.mesh.shape

    def fitting(names: Sequence[str], divides: Callable[[int], bool]) -> Names:
        names = [name for name in names if name not in used]
        while names and not divides(math.prod(sizes[name] for name in names)):
            names.pop()
        used.update(names)
        return tuple(names)

    *lead, rows, packed = codes.shape
    blocks = scales.shape[-1]
    unit = num_bytes(format.group, format.bits)
    *of_lead, of_rows, of_columns = plan.of(codes.ndim)
    stack = tuple(
        fitting(names, lambda parts, size=size: size % parts == 0)
        for names, size in zip(of_lead, lead, strict=True)
    )
    in_stack = set(used)
    of_rows = fitting(of_rows, lambda parts: rows % parts == 0)
    of_columns = fitting(
        of_columns,
        lambda parts: (
            packed % (parts * unit) == 0 and (blocks == 1 or blocks % parts == 0)
        ),
    )
    used = in_stack
    batch = fitting(plan.batch, lambda parts: x.shape[-2] % parts == 0)
    return Layout(stack, batch, of_rows, of_columns, frozenset(batch))


def plan_from_types(x, codes, scales=None, asked: Plan | None = None) -> Plan | None:
    """Return the plan on a mesh with explicit axes; None on other meshes.

    Types do not contain the requested sharding of the result: the plan argument of the
    product contains it.
    """
    mesh = explicit_mesh_of(codes) or explicit_mesh_of(x)
    if mesh is None:
        return None
    axes, batch = tuple(map(names_of, spec_of(codes))), names_of(spec_of(x)[-2])
    scatter: tuple[Names, Names] = ((), ())
    if asked is not None and asked.mesh == mesh:
        batch, scatter = asked.batch, asked.scatter
    left = () if scales is None else map(names_of, spec_of(scales))
    whole = scales is not None and not {n for names in left for n in names} & {*batch}
    return Plan(mesh, axes, batch, scatter, whole_scales=whole)


def plan_for(
    ctx: mlir.LoweringRuleContext, plan: Plan | None, x, codes, scales=None
) -> Plan | None:
    """Return the plan of a product during lowering. Warn if there is none."""
    explicit = plan_from_types(x, codes, scales, plan)
    if explicit is not None:
        return explicit
    # Both operands come from outside of the mesh: they are replicated.
    if has_explicit_axes():
        return Plan(jax.sharding.get_abstract_mesh(), ())
    devices = num_devices(ctx)
    if plan is not None and plan.mesh.size == devices:
        return plan
    warn(
        f"quantized_dot: a product is compiled for {devices} devices without a plan"
        f"{'' if plan is None else f' for this mesh (its plan is for {plan.mesh})'}. "
        "It gets no kernel, and every device may gather its weight. Shard the model by "
        "`eqquant.shard_tree(model, mesh, specs)`, use a mesh with explicit axes, or "
        "use `jax.shard_map`.",
        UserWarning,
        once=True,
    )
    return None


def sharding_of_result(x, codes, spec: PartitionSpec):
    """Return the sharding of a result type, on a mesh with explicit axes."""
    return (x if explicit_mesh_of(x) else codes).sharding.update(spec=spec)


def sharded(dot: Callable, plan: Plan) -> Callable:
    """Run `dot(x, codes, scales, matmul, over=mesh axes of the sum)` on the shards of
    each device."""

    def call(x, codes, scales, *, matmul: Matmul):
        layout = layout_of(plan, x, codes, scales, matmul.format)
        contract_rows, out_dtype = matmul.contract_rows, matmul.out_dtype
        blocks = scales.shape[-1]
        over = layout.contracted(contract_rows)
        # Sum before rounding.
        dtype = jnp.promote_types(out_dtype, jnp.float32) if over else out_dtype
        part = dataclasses.replace(matmul, out_dtype=dtype)

        scatter, out_specs = layout.of_sum(plan, x, codes, matmul.format, contract_rows)

        def local(x, codes, scales):
            codes = gather(layout, codes)
            if not plan.whole_scales:
                scales = gather(layout, scales, blocks)
            out = dot(x, codes, scales, matmul=part, over=over)
            left = over
            for axis, names in zip((-2, -1), scatter, strict=True):
                if names:
                    axis = out.ndim + axis
                    out = lax.psum_scatter(
                        out, names, scatter_dimension=axis, tiled=True
                    )
                    left = tuple(name for name in left if name not in names)
            out = lax.psum(out, left) if left else out
            return out.astype(out_dtype)

        in_specs = (
            layout.of_x(contract_rows),
            layout.of_weight(),
            (layout.whole if plan.whole_scales else layout).of_weight(blocks),
        )
        return on_shards(local, plan, in_specs, out_specs)(x, codes, scales)

    return call


def on_each_device(
    plan: Plan, x, codes, scales, matmul: Matmul
) -> tuple[list[jax.ShapeDtypeStruct], Names, str]:
    """Return the shapes of the shards, the mesh axes of the sum, and a description of
    the collectives."""
    format, contract_rows = matmul.format, matmul.contract_rows
    layout = layout_of(plan, x, codes, scales, format)
    over = layout.contracted(contract_rows)
    specs = (
        layout.of_x(contract_rows),
        layout.whole.of_weight(),
        layout.whole.of_weight(scales.shape[-1]),
    )

    def part(a, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        parts = [parts_of(plan.mesh, entry) for entry in spec]
        shape = [n // k for n, k in zip(a.shape, parts, strict=True)]
        return jax.ShapeDtypeStruct(shape, a.dtype)

    shards = list(map(part, (x, codes, scales), specs))
    words = f", on each of {plan.mesh.size} devices"
    if names := layout.gathers((*layout.rows, *layout.columns)):
        words += f", codes and scales gathered over {', '.join(names)} before"
    if over:
        scatter, _ = layout.of_sum(plan, x, codes, format, contract_rows)
        scattered = [name for names in scatter for name in names]
        left = [name for name in over if name not in scattered]
        if scattered:
            words += f", results summed and scattered over {', '.join(scattered)} after"
        if left:
            words += f", results summed over {', '.join(left)} after"
    return shards, over, words


def gather(layout: Layout, part, blocks: int | None = None):
    """All-gather a part of a weight, from devices with other rows of the activation.

    The part is codes, or scales with `blocks` blocks per row.
    """
    for axis, names in ((-2, layout.rows), (-1, layout.columns)):
        names = layout.gathers(names)
        if names and not (axis == -1 and blocks == 1):
            part = lax.all_gather(part, names, axis=part.ndim + axis, tiled=True)
    return part


def on_shards(local: Callable, plan: Plan, in_specs: tuple, out_specs) -> Callable:
    """Run `local` on every device of the mesh of a plan."""
    manual = manual_axes_in_context()

    def call(*args):
        if manual:  # Inside of a `shard_map` over other mesh axes.
            mesh = jax.sharding.get_abstract_mesh()
            free = set(mesh.axis_names) - manual
        else:
            mesh, free = plan.mesh, set(plan.mesh.axis_names)
        with jax.sharding.use_abstract_mesh(mesh):
            if AxisType.Explicit in mesh.axis_types:
                # The compiler does not read types. Without this, it would shard the
                # carry of a loop like its products.
                own = (PartitionSpec(*spec_of(x)) for x in args)
                for specs in (own, in_specs):
                    args = tuple(map(jax.sharding.reshard, args, specs))
            fn = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=free,
                check_vma=False,
            )
            return fn(*args)

    return call
