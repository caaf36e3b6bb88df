"""The table that chooses the native kernel of a product, and its interpreter.

A rule has a kernel, the instruction sets that it may use, and conditions. The first
rule that holds serves. `XLA` means that XLA is faster. The facts in conditions are:

- `m`, `k`: the rows and columns of the activation; `rows`, `columns`: the shape of the
  weight. `x` = m * k and `y` = m * columns are sizes, and `bytes` is the size of all
  codes. `M` is 2**20.
- `product`: `x@w.T` or `x@w`. `precision`: the precision that was requested.
- `activation`: the precision that the product requires of activations. `exact` is
  float32, `int16` at least 15 bits, and `int8` 8 bits.
- `operands`: `bfloat16` if both operands are, `int8` for int8 activations, otherwise
  `float`.
- `weight`: `int8` or `integers` (fewer bits) if int8 holds each row with one scale and
  int32 holds the sums. `float8` has one scale per row. `values` and `float8-blocks` are
  8-bit codes in blocks. `table` is any other weight.
- `levels`: `int8` if levels are integers up to 127 times a number, otherwise `float`.
  `small` if 16 bits also hold the sum of the products of two bytes of codes.
- `sums`: the integer type, `int32` or `int64`, that holds `k` products of int8.
- `bits`: of a code. `run`: the bytes of consecutive codes of one plane.
- `fits`: whole blocks fill AMX tiles (`tiles`), 64 bytes (`lanes`), 32 bytes or equal
  parts of them (`halves`), registers of sixteen bytes with short runs (`vectors`), or
  registers in whole rows (`panels`); `sixteen` if the bytes of a block are a multiple
  of 16, and `long` if they are at least `int8_long_block` and a multiple of 4. For
  `lanes` and `halves`, weights in `x@w.T` have at least 8 rows.
- `cpu`: the instruction sets, and `bfloat16` if XLA multiplies bfloat16 fast.

A kernel works in several ways, for few and for many rows. `src/runtime/limits.h` is the
table of these limits, which C++ includes.

`benchmarks/tune_cpu.py` measures the bounds on `m`; docs/internals/cpu-kernels.md has
the machines.
"""

import functools as ft
import operator
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


_RULES = """
# Tiles decode the weight once for all rows, registers for every row.
bfloat16|amx|product=x@w.T activation=int16 operands=bfloat16 weight=table fits=sixteen m>=8
bfloat16|amx|product=x@w.T activation=int16 operands=bfloat16 weight=values fits=sixteen m>=12
int8|amx|product=x@w.T activation=int8 weight=int8 fits=tiles m>=6
int8|amx|product=x@w.T activation=int8 weight=integers,values,float8-blocks fits=tiles m>=9
int8|amx|product=x@w.T activation=int8 weight=table fits=tiles m>=4
int8|amx|product=x@w.T activation=int8 weight=float8 fits=tiles m>=2
int8|amx|product=x@w activation=int8 weight=int8 fits=tiles m>=5
int8|amx|product=x@w activation=int8 weight=table fits=tiles m>=4
int8|amx|product=x@w activation=int8 weight=integers,float8 fits=tiles m>=3
int8|amx|product=x@w activation=int8 weight=values,float8-blocks fits=tiles m>=8
int8x2|amx|product=x@w.T activation=int16 weight=int8 fits=tiles m>=4
int8x2|amx|product=x@w.T activation=int16 weight=integers fits=tiles m>=7
int8x2|amx|product=x@w.T activation=int16 weight=table fits=tiles m>=8
int8x2|amx|product=x@w.T activation=int16 weight=float8 fits=tiles m>=5
int8x2|amx|product=x@w.T activation=int16 weight=values,float8-blocks fits=tiles m>=13
int8x2|amx|product=x@w activation=int16 weight=int8 fits=tiles m>=6
int8x2|amx|product=x@w activation=int16 weight=integers fits=tiles m>=3
int8x2|amx|product=x@w activation=int16 weight=table fits=tiles m>=6
int8x2|amx|product=x@w activation=int16 weight=float8 fits=tiles m>=5
int8x2|amx|product=x@w activation=int16 weight=values,float8-blocks fits=tiles m>=11
float|avx512|product=x@w activation=int8,int16 fits=tiles cpu=amx
# Exact int8 weights. Rounding to int8x2 moves as many bytes as the product, and the
# system clears the pages of a large rounded activation. Few rows do not pay for that.
int8|vnni,i8mm,dotprod|product=x@w.T activation=int8 weight=int8,integers
int8x2|vnni,i8mm,dotprod|product=x@w.T activation=int16 weight=int8,integers rows>256
int8x2|vnni,i8mm,dotprod|product=x@w.T activation=int16 weight=int8,integers bits=1 m<2048 x<16M
int8x2|vnni,i8mm,dotprod|product=x@w.T activation=int16 weight=int8,integers bits>1 x<16M
# One or two rows: levels are rounded to int8, without scales. For more rows, weights are
# rounded, once for all rows of the activation.
int8|vnni|product=x@w.T activation=int8 weight=table,values fits=lanes k>64 m<3
int8x2|vnni|product=x@w.T activation=int16 weight=table,values levels=int8,small bits>2 fits=lanes k>64 m<3
int8|vnni|product=x@w.T activation=int8 weight=table,values sums=int32 fits=lanes m>=16
int8|vnni|product=x@w.T activation=int8 weight=table,values sums=int32 fits!=lanes m>=8
int8|i8mm,dotprod|product=x@w.T activation=int8 weight=table,values sums=int32 m>=8
# Codes of 8 bits in long blocks are not rounded. Few rows do not pay for transposing them.
int8x2|vnni|product=x@w.T activation=int16 weight=values levels=int8,small fits=long rows>=128 m>=12
# Rounding the activation to int16 does not pay for short rows, such as keys of a cache,
# or for few rows of the weight.
float|avx512|product=x@w.T activation=int8,int16 weight=table,values k<=64
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes rows>384
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes rows>256 k>512
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes rows>256 run>16
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes rows>256 m<48
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes m<48 x<16M
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes k>512 run>16 x<16M
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes k>512 run>8 m<1024 x<16M
int16|vnni|product=x@w.T activation=int8,int16 weight=table,values fits=lanes k>512 m<256 x<16M
int16|vnni|product=x@w activation=int8,int16 weight!=float8,float8-blocks fits=panels bits<3 m>=3
int16|vnni|product=x@w activation=int8,int16 weight!=float8,float8-blocks fits=panels bits=3 m>=16
int16|vnni|product=x@w activation=int8,int16 weight!=float8,float8-blocks fits=panels bits>3 bytes<4M m>=8
int16|vnni|product=x@w activation=int8,int16 weight!=float8,float8-blocks fits=panels bits>3 m>=12
# Every two rows of the activation decode the weight. For more rows, floats decode it once.
int8|avx2|product=x@w.T activation=int8 levels=small bits<5 fits=halves cpu!=avx512 m<11
int16|avx2|product=x@w.T activation=int8,int16 weight!=float8,float8-blocks fits=halves cpu!=avx512 bits>2 m<11
int16|avx2|product=x@w.T activation=int8,int16 weight!=float8,float8-blocks fits=halves cpu!=avx512 bits<3 m<6
# XLA multiplies int8 codes without decoding them.
XLA||weight=int8 activation=int8 cpu!=vnni,dotprod m>32
XLA||product=x@w weight=int8,integers activation=int8,int16 cpu=dotprod m>8
# Parts of registers.
XLA||product=x@w.T fits!=vectors cpu=avx512 m>128
XLA||product=x@w.T fits!=vectors cpu!=avx512 m>64
XLA||product=x@w fits!=panels cpu=avx512 m>64
XLA||product=x@w fits!=panels cpu!=avx512 m>16
# XLA rounds both operands to bfloat16, which pays unless writes take the time.
XLA||product=x@w.T precision=default cpu=bfloat16 m>128
float|avx512,avx2,neon|product=x@w rows<1024 y>=4M
float|avx512,avx2,neon|product=x@w columns<512 x>=8M
XLA||product=x@w precision=default cpu=bfloat16 bits=3 m>512
XLA||product=x@w precision=default cpu=bfloat16 bits=1,2,4 m>256
XLA||product=x@w precision=default cpu=bfloat16 weight=float8,float8-blocks m>256
float|avx512,avx2,neon|
"""  # noqa: E501

Fact = int | str | frozenset[str]
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Condition(NamedTuple):
    fact: str
    relation: str
    value: str

    @property
    def bound(self) -> int:
        number = self.value.removesuffix("M")
        return int(number) << (20 if number != self.value else 0)

    @property
    def holds(self) -> Callable[[Any], bool]:
        """The condition as a function of the fact."""
        if self.relation in _ORDER:
            order, bound = _ORDER[self.relation], self.bound
            return lambda fact: order(fact, bound)
        values, holds = frozenset(self.value.split(",")), self.relation == "="
        if self.fact in ("cpu", "fits"):  # These facts are sets.
            return lambda fact: values.isdisjoint(fact) != holds
        return lambda fact: (str(fact) in values) == holds

    def __str__(self) -> str:
        return "".join(self)


class Rule(NamedTuple):
    """A row of the table. `number` counts from 1."""

    number: int
    kernel: str
    sets: tuple[str, ...]
    conditions: tuple[Condition, ...]

    def instructions(self, cpu: frozenset[str]) -> str | None:
        """Return the instruction set that the kernel uses on a CPU, if there is one."""
        return next((name for name in self.sets if name in cpu), None)

    def runs_on(self, cpu: frozenset[str]) -> bool:
        """Return whether the rule may hold on a CPU."""
        if self.kernel != "XLA" and self.instructions(cpu) is None:
            return False
        return all(c.holds(cpu) for c in self.conditions if c.fact == "cpu")


def _parse(text: str) -> tuple[Rule, ...]:
    lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
    rules = []
    for number, line in enumerate(lines, 1):
        kernel, sets, conditions = line.split("|")
        parts = [
            re.fullmatch(r"(\w+)(!=|<=|>=|=|<|>)(.+)", c) for c in conditions.split()
        ]
        found = tuple(Condition(*part.groups()) for part in parts if part)
        assert len(found) == len(parts), line
        rules.append(Rule(number, kernel, tuple(filter(None, sets.split(","))), found))
    return tuple(rules)


RULES = _parse(_RULES)


@ft.cache
def _rules_on(cpu: frozenset[str]) -> tuple[tuple[Rule, list], ...]:
    """Return the rules that may hold on a CPU, with their conditions as functions."""
    return tuple(
        (rule, [(c.fact, c.holds) for c in rule.conditions])
        for rule in RULES
        if rule.runs_on(cpu)
    )


def first_rule(facts: Mapping[str, Any]) -> Rule:
    """Return the first rule that holds. The last rule holds for every product."""
    for rule, conditions in _rules_on(facts["cpu"]):
        if all(holds(facts[name]) for name, holds in conditions):
            return rule
    raise AssertionError("no rule holds")


def describe_rules(cpu: frozenset[str] | None = None) -> str:
    """Return the table as text: all rules, or the rules that may hold on a CPU."""
    lines = []
    for rule in RULES:
        if cpu is None or rule.runs_on(cpu):
            start = f"{rule.number:2} {rule.kernel:8} {','.join(rule.sets):18}"
            lines.append(" ".join((start, *map(str, rule.conditions))).rstrip())
    return "\n".join(lines)


class Limit(NamedTuple):
    """A row of the table of limits within kernels."""

    name: str
    value: int
    meaning: str


@ft.cache
def limits() -> tuple[Limit, ...]:
    """Return the table of limits within kernels."""
    path = pathlib.Path(__file__).parent / "src" / "runtime" / "limits.h"
    rows = re.findall(
        r'^EQQUANT_LIMIT\((\w+), (\d+)(?: << (\d+))?, "(.*)"\)$',
        path.read_text(),
        re.MULTILINE,
    )
    return tuple(
        Limit(name, int(value) << int(shift or 0), meaning)
        for name, value, shift, meaning in rows
    )


def limit(name: str) -> int:
    """Return the value of a limit within kernels."""
    return next(row.value for row in limits() if row.name == name)


def describe_limits() -> str:
    """Return the table of limits within kernels as text."""
    return "\n".join(f"{n:26}{v:>9}  {meaning}".rstrip() for n, v, meaning in limits())
