"""The native kernels, and the facts by which the table in `_rules.py` chooses one."""

import dataclasses
import functools as ft

from ...formats import Format
from .._int8 import rounding
from .._int8_sums import longest_int8_sum
from .._product import Kernel, Product
from ._call import (
    call,
    has_int8_levels,
    has_small_levels,
    row_bytes,
    run_of,
    unpacked_bits,
)
from ._library import INT8_SETS, Library, load, status
from ._rules import describe_limits, describe_rules, Fact, first_rule, limit, Rule


# The rounding of each arithmetic; the bits of an activation that it keeps, or None for
# all bits; and the products that it serves.
_ARITHMETIC: dict[str, tuple[str, int | None, str]] = {
    "float": ("nothing", None, "everything else, unless XLA is faster"),
    "bfloat16": ("both operands to bfloat16", None, "bfloat16 operands"),
    "int8": (
        "activations to int8, and weights that int8 does not hold",
        8,
        '`"default"`, or int8 activations',
    ),
    "int8x2": (
        "activations, and weights that int8 does not hold, to 15 bits",
        15,
        '`"high"`',
    ),
    "int16": (
        "activations to 16 bits, levels to 15 bits",
        16,
        "blocked weights and codebooks; `x @ w`",
    ),
}
# Instruction sets that are printed in another way.
_LABELS = {name: name.upper() for name in ("amx", "vnni", "avx2", "neon")}
_LABELS["avx512"] = "AVX-512"


@dataclasses.dataclass(frozen=True)
class NativeKernel(Kernel):
    """A native kernel. `arithmetic` names the numbers that it multiplies, and
    `instructions` the set of instructions that it needs."""

    arithmetic: str
    instructions: str
    error: str

    @property
    def label(self) -> str:
        return _LABELS.get(self.instructions, self.instructions)

    @property
    def name(self) -> str:
        return f"{self.arithmetic}, {self.label}"

    @property
    def rounding(self) -> str:
        return _ARITHMETIC[self.arithmetic][0]

    @property
    def when(self) -> str:
        if self.instructions == "avx2" and self.arithmetic != "float":
            is_int8 = self.arithmetic == "int8"
            served = _ARITHMETIC["int8"][2] if is_int8 else "`x @ w.T`"
            return f"up to 10 rows of an activation; {served}"
        tiles = "; enough rows for tiles" if self.instructions == "amx" else ""
        return _ARITHMETIC[self.arithmetic][2] + tiles

    def why_not(self, product):
        library = load()
        if isinstance(library, str):
            return library
        if reason := why_unsupported(product):
            return reason
        cpu = cpu_of(library)
        rule = rule_of(product, cpu)
        if rule.kernel == "XLA":
            faster = "XLA is faster than the native kernels"
            return f"for {product.m} rows {faster} (rule {rule.number})"
        chosen = rule.kernel, rule.instructions(cpu)
        if chosen != (self.arithmetic, self.instructions):
            return f"rule {rule.number} chooses another kernel"
        return None

    reads_short_scales = True
    reads_offsets = True
    reads_views = True
    rounds_to_int8 = True

    def lower(
        self,
        product,
        x,
        codes,
        scales,
        x_unit=None,
        interpret=False,
        view=None,
        offsets=None,
    ):
        rounds = product.is_int8 and x_unit is None
        numbers = scales, x_unit, offsets
        return call(self.name, product, x, codes, *numbers, rounds, view)

    def describe(self, product):
        bits = _ARITHMETIC[self.arithmetic][1]
        library = load()
        assert not isinstance(library, str), library
        number = rule_of(product, cpu_of(library)).number
        rounded = rounding(product.x, bits)
        return f"native kernel {self.name!r} by rule {number} {rounded}"


def why_unsupported(product: Product) -> str | None:
    """Return why no native kernel computes a product, whatever its speed."""
    format = product.format
    if reason := product.too_wide("native kernels compute"):
        return reason
    if format.history and not _is_known(format):
        return product.has_history
    if product.is_empty:
        return "there is nothing to multiply"
    if format.bits != format.code_bits:
        return "there are no native kernels for codes that share bits"
    if format.bits > 4 and not (format.integer_levels or format.float8):
        return f"there are no native kernels for codes like those of {format.name}"
    if unpacked_bits(format) > 4 and format.centred[1]:
        return "the levels are not centred"
    if product.blocks > 1 and _block(product) < 8:
        return f"blocks of {format.block_size} are shorter than a register"
    return None


def _is_known(format: Format) -> bool:
    """Return whether the kernels decode codes with this history to int8 levels."""
    most_levels = {2: 32, 3: 64, 4: 128}.get(format.bits, 0)
    table, state_bits = format.linear_table, format.bits * (format.history + 1)
    if table is None or len(table.levels) > most_levels or state_bits != 12:
        return False
    # The highest bit of an index is the sign of the level.
    return all(a == -b for a, b in zip(table.levels, table.levels[::-1], strict=True))


def _block(product: Product) -> int:
    """Return the bytes of a block."""
    return row_bytes(product) // product.blocks


@ft.lru_cache(maxsize=256)  # `choose` tries all kernels in turn.
def rule_of(product: Product, cpu: frozenset[str]) -> Rule:
    """Return the rule that serves a product on a CPU."""
    return first_rule(facts_of(product, cpu))


def facts_of(product: Product, cpu: frozenset[str]) -> dict[str, Fact]:
    """Return the facts that rules test; `_rules.py` describes them."""
    m, k, rows, columns = product.m, product.size, product.rows, product.columns
    int32 = k <= longest_int8_sum
    is_exact = product.has_integer_rows and int32
    rounds = is_exact and product.is_int8
    activation = "int8" if product.precision == "default" or rounds else "int16"
    dtype = "bfloat16" if product.is_all("bfloat16") else "float"
    return {
        "m": m,
        "k": k,
        "rows": rows,
        "columns": columns,
        "x": m * k,
        "y": m * columns,
        "bytes": rows * product.packed,
        "product": "x@w" if product.contract_rows else "x@w.T",
        "precision": product.precision,
        "activation": "exact" if product.precision == "highest" else activation,
        "operands": "int8" if product.is_int8 else dtype,
        "weight": _weight(product, is_exact),
        "levels": _level_type(product.format),
        "sums": "int32" if int32 else "int64",
        "bits": 8 if product.format.history else product.format.bits,
        "run": run_of(product),
        "fits": _fits(product),
        "cpu": cpu,
    }


def cpu_of(library: Library) -> frozenset[str]:
    """Return the fact `cpu`."""
    also = {"bfloat16"} if library.bfloat16 else set()
    return frozenset(library.instructions) | also


def _weight(product: Product, is_exact: bool) -> str:
    """Return how kernels decode a weight."""
    format, blocked = product.format, product.blocks > 1
    if is_exact:
        return "int8" if format.bits == 8 else "integers"
    if format.float8:
        return "float8-blocks" if blocked else "float8"
    return "values" if blocked and unpacked_bits(format) == 8 else "table"


def _level_type(format: Format) -> str:
    """Return the type of the levels without their common divisor."""
    if has_small_levels(format):
        return "small"
    return "int8" if has_int8_levels(format) else "float"


def _fits(product: Product) -> frozenset[str]:
    """Return the registers and tiles that whole blocks, or parts of one, fill."""
    block, blocks, row = _block(product), product.blocks, row_bytes(product)
    bits, one = unpacked_bits(product.format), blocks == 1
    sixteen = block % 16 == 0
    fill_tile = product.contract_rows or product.rows >= 8
    tiles = one or sixteen or (block == 8 and bits < 8)
    lanes = one or block % 64 == 0 or (64 % block == 0 and block % 4 == 0)
    pairs = bits == 8 or run_of(product) % 2 == 0
    vectors = one or sixteen or (block == 8 and blocks % 2 == 0)
    halves = (8, 16) if bits == 4 else (16,)
    short = product.format.group <= 1024
    fits = {
        "sixteen": sixteen,
        "tiles": tiles,
        "lanes": lanes and pairs and fill_tile,
        "long": block >= limit("int8_long_block") and block % 4 == 0,
        "halves": fill_tile and (one or block in halves or block % 32 == 0),
        "vectors": vectors and short,
        "panels": vectors and row % 16 == 0,
    }
    return frozenset(name for name, holds in fits.items() if holds)


def describe(everywhere: bool = False) -> str:
    """Describe the library, the rules that choose a kernel (on this CPU, or on every
    CPU), and the limits within kernels."""
    library = load()
    cpu = None if everywhere or isinstance(library, str) else cpu_of(library)
    head = f"{status()}\nThe first rule that holds serves a product:\n\n"
    return (
        f"{head}{describe_rules(cpu)}\n\nLimits within kernels:\n\n{describe_limits()}"
    )


_SETS = {
    "bfloat16": {"amx": "3e-3"},
    "int8": {"amx": "1.3e-2"} | dict.fromkeys((*INT8_SETS, "avx2"), "1e-2"),
    "int8x2": {"amx": "8e-5"} | dict.fromkeys(INT8_SETS, "4e-5"),
    "int16": dict.fromkeys(("vnni", "avx2"), "5e-5"),
    "float": dict.fromkeys(("avx512", "avx2", "neon"), "1e-6"),
}
KERNELS = tuple(
    NativeKernel(arithmetic, instructions, error)
    for arithmetic, sets in _SETS.items()
    for instructions, error in sets.items()
)
