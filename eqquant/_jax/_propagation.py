"""What Shardy, the compiler's own pass, would split of a program, and how.

Operations are marked by custom calls, which say in a sharding rule what goes with what.
Shardy then propagates shardings over the module, and those of the marks are read. No
program with a mark is ever run.

`jax.extend.mlir` has all that this takes. JAX promises little of it: tried with 0.10.2,
0.11.2 and 0.12.0.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import mlir


_TARGET = "eqquant_mark"
Dims = Sequence[Sequence[str]]  # The factors of each axis of an array.


@dataclasses.dataclass(frozen=True)
class Factors:
    """A sharding rule: factors that are of one name in several arrays are split alike.

    **Fields:**

    - `sizes`: of each factor.
    - `operands`, `result`: the factors of each axis, the major one first.
    - `summed`: those over which a sum is taken.
    """

    sizes: Mapping[str, int]
    operands: Sequence[Dims]
    result: Dims
    summed: Sequence[str] = ()

    def attribute(self) -> Any:
        dims = [*self.operands, self.result]
        # Shardy takes no factor of one beside others.
        dims = [[self._many(axis) or axis[:1] for axis in array] for array in dims]
        names = list(dict.fromkeys(name for d in dims for axis in d for name in axis))

        def of(array: Dims) -> Any:
            axes = [sdy.DimMappingAttr.get([*map(names.index, f)]) for f in array]
            return sdy.TensorMappingAttr.get(axes)

        *operands, result = map(of, dims)
        return sdy.OpShardingRuleAttr.get(
            [self.sizes[name] for name in names],
            operands,
            [result],
            [names.index(name) for name in self.summed if name in names],
            is_custom=True,
        )

    def _many(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]


def mark(values: Sequence, aval: Any, label: str, factors: Factors) -> Any:
    """An operation of these factors, in a program that is being lowered."""
    op = stablehlo.CustomCallOp(
        [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))],
        list(values),
        call_target_name=ir.StringAttr.get(_TARGET),
        backend_config=ir.StringAttr.get(label),
        api_version=mlir.i32_attr(2),
    )
    op.attributes["sdy.sharding_rule"] = factors.attribute()
    return op.results[0]


def mark_operand(value: Any, aval: Any, label: str) -> Any:
    """The same value, whose sharding will be known."""
    sizes = {str(axis): size for axis, size in enumerate(aval.shape)}
    dims = [(name,) for name in sizes]
    return mark([value], aval, label, Factors(sizes, [dims], dims))


def propagate(lowered: jax.stages.Lowered) -> dict[str, list[tuple[str, ...]]]:
    """Of the result of each mark, the mesh axes that split each of its axes."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise ValueError(
            "partitioned_jit: jax_use_shardy_partitioner is off, but only Shardy can "
            "be asked how it splits a program. Turn it on, or call eqquant.shard_tree."
        )
    program: Any = lowered.compiler_ir("stablehlo")
    text = program.operation.get_asm(binary=True)
    found: dict[str, list[tuple[str, ...]]] = {}

    def read(op):
        attributes = op.attributes
        if op.name != "stablehlo.custom_call" or _TARGET not in str(
            attributes["call_target_name"]
        ):
            return ir.WalkResult.ADVANCE
        label = ir.StringAttr(attributes["backend_config"]).value
        found[label] = []
        if "sdy.sharding" in attributes:
            (one,) = sdy.TensorShardingPerValueAttr(
                attributes["sdy.sharding"]
            ).shardings
            dims = sdy.TensorShardingAttr(one).dimension_shardings
            found[label] = [_names(sdy.DimensionShardingAttr(dim)) for dim in dims]
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        passes = passmanager.PassManager.parse(
            "builtin.module(inline,sdy-propagation-pipeline)"
        )
        passes.run(module.operation)
        module.operation.walk(read)
    return found


def _names(dim) -> tuple[str, ...]:
    names = []
    for axis in map(sdy.AxisRefAttr, dim.axes):
        if axis.sub_axis_info is not None:  # A part of an axis of the mesh.
            break
        names.append(axis.name)
    return tuple(names)
