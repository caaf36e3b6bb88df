"""Products in a program of which it is asked how it would be split."""

import dataclasses
import math
from typing import Any

from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from .._jax import Factors, mark, mark_operand
from ..formats import Format, num_bytes, num_codes
from ._plan import Names, Plan


@dataclasses.dataclass(frozen=True)
class Mark:
    """In place of a plan that is not known yet, of the `number`th product of its
    program."""

    number: int

    def _label(self, part: str) -> str:
        return f"{self.number} {part}"

    def lower(
        self, ctx: mlir.LoweringRuleContext, args: tuple, codes: int, factors: Factors
    ) -> list:
        """As an operation of these factors. The activation is the first argument, and
        the codes are the one of that number."""
        values = list(args)
        for part, i in (("x", 0), ("codes", codes)):
            label = self._label(part)
            values[i] = mark_operand(values[i], ctx.avals_in[i], label)
        (out,) = ctx.avals_out
        return [mark(values, out, self._label("out"), factors)]

    def plan(
        self, found: dict[str, list[Names]], mesh: AbstractMesh, ndim: int
    ) -> Plan:
        """By what was found of the marks, for codes of so many axes."""
        x, codes, out = (
            found.get(self._label(part)) or [()] * ndim
            for part in ("x", "codes", "out")
        )
        return Plan(mesh, tuple(codes), x[-2], (out[-2], out[-1]))


def factors_of_dot(
    x: Any, codes: Any, scales: Any, *, format: Format, contract_rows: bool
) -> Factors:
    """Those of `quantized_dot`."""
    sizes, stack, columns, packed, blocks = _of_weight(codes, scales.shape[-1], format)
    sizes["m"] = x.shape[-2]
    contracted, free = ("rows",), columns
    if not contract_rows:
        contracted, free = free, contracted
    operands = [
        [*stack, ("m",), contracted],
        [*stack, ("rows",), packed],
        [*stack, ("rows",), blocks],
    ]
    return Factors(sizes, operands, [*stack, ("m",), free], contracted)


def factors_of_scale_gradient(
    over_rows: Any, over_columns: Any, codes: Any, *, blocks: int, format: Format
) -> Factors:
    """Those of `scale_gradient`."""
    del over_columns
    sizes, stack, columns, packed, of_blocks = _of_weight(codes, blocks, format)
    sizes["m"] = over_rows.shape[-2]
    operands = [
        [*stack, ("m",), ("rows",)],
        [*stack, ("m",), columns],
        [*stack, ("rows",), packed],
    ]
    return Factors(sizes, operands, [*stack, ("rows",), of_blocks], ("m",))


def _of_weight(codes: Any, blocks: int, format: Format):
    """The sizes of its factors; those of its stack, its columns, and the last axes of
    codes and scales. What is split goes between groups of codes, and between blocks."""
    *lead, rows, packed = codes.shape
    groups = packed // num_bytes(format.group, format.bits)
    parts = max(groups if blocks == 1 else math.gcd(blocks, groups), 1)
    of_stack = {f"stack {i}": size for i, size in enumerate(lead)}
    sizes = of_stack | {
        "rows": rows,
        "parts": parts,
        "values": num_codes(packed, format.bits) // parts,
        "bytes": packed // parts,
        "blocks": max(blocks // parts, 1),
    }
    stack = [(name,) for name in of_stack]
    of_blocks = ("blocks",) if blocks == 1 else ("parts", "blocks")
    return sizes, stack, ("parts", "values"), ("parts", "bytes"), of_blocks
