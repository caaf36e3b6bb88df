"""The native kernels, and the products for which each of them is the fastest.

Thresholds were measured on CPUs with AVX2, AVX-512, VNNI and AMX: docs/cpu.md.
"""

import abc
import dataclasses
import math

from .._int8 import rounding
from .._product import Kernel, Product
from ..xla import longest_int8_sum
from ._call import call, row_bytes, run_of, unpacked_bits
from ._library import INT8_SETS, Library, load


# The rounding of each arithmetic, and the bits of an activation that it keeps, or None
# for all bits.
_ARITHMETIC: dict[str, tuple[str, int | None]] = {
    "float": ("nothing", None),
    "bfloat16": ("both operands to bfloat16", None),
    "int8": ("activations to int8, and weights that int8 does not hold", 8),
    "int8x2": (
        "activations, and weights that int8 does not hold, to 15 bits",
        15,
    ),
    "int16": ("activations to 16 bits, levels to 15 bits", 16),
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

    def why_not(self, product):
        library = load()
        if isinstance(library, str):
            return library
        reason = _unsupported(product) or self.why_slower(product, library)
        if reason is None and self.instructions not in library.instructions:
            return f"this CPU lacks {self.label}"
        return reason

    @abc.abstractmethod
    def why_slower(self, product: Product, library: Library) -> str | None:
        """Return why another kernel is faster, or None."""

    reads_short_scales = True
    reads_offsets = True
    reads_views = True

    def rounds_to_int8(self, product):
        # In `x @ w`, kernels multiply the activation by scales before they round it.
        return self.arithmetic == "int8" and not product.contract_rows

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
        _, bits = _ARITHMETIC[self.arithmetic]
        return f"native kernel {self.name!r} {rounding(product.x, bits)}"


def _unsupported(product: Product) -> str | None:
    """Return why no native kernel computes a product, whatever its speed."""
    format = product.format
    if reason := product.too_wide("native kernels compute"):
        return reason
    if product.is_empty:
        return "there is nothing to multiply"
    if format.bits > 4 and not (format.integer_levels or format.float8):
        return f"there are no native kernels for codes like those of {format.name}"
    if unpacked_bits(format) > 4 and format.centred[1]:
        return "the levels are not centred"
    if product.blocks > 1 and _block(product) < 8:
        return f"blocks of {format.block_size} are shorter than a register"
    return None


def _block(product: Product) -> int:
    """Return the bytes of a block."""
    return row_bytes(product) // product.blocks


def _is_exact_int8(product: Product) -> bool:
    """Return whether int8 holds the weight exactly, and int32 the sums."""
    return product.has_integer_rows and product.size <= longest_int8_sum


def _rounds_to_int8(product: Product) -> bool:
    return product.precision == "default" or product.is_int8


@dataclasses.dataclass(frozen=True)
class TileKernel(NativeKernel):
    """A kernel for AMX tiles.

    `least` is the number of rows from which tiles beat registers, by the way in which
    the weight is decoded: first for `x @ w.T`, then for `x @ w`. Registers decode the
    weight for every row, and tiles once for all rows.
    """

    least: dict[str, tuple[int, int]]

    when = 'enough rows for tiles; not with `"highest"`'

    def why_slower(self, product, library):
        if not _may_use_tiles(product, library):
            return "tiles are for whole blocks, and not for precision 'highest'"
        if _tile_arithmetic(product) != self.arithmetic:
            return f"tiles multiply {_tile_arithmetic(product)} here"
        least = self.least[_tile_decoding(product)][product.contract_rows]
        return None if product.m >= least else f"tiles need {least} rows"


def _may_use_tiles(product: Product, library: Library) -> bool:
    """Return whether sixteen bytes belong to one block, or to two with tables."""
    if "amx" not in library.instructions or product.precision == "highest":
        return False
    if product.blocks == 1:
        return True
    block = _block(product)
    return block % 16 == 0 or (block == 8 and unpacked_bits(product.format) < 8)


def _tile_arithmetic(product: Product) -> str:
    exact = _is_exact_int8(product)
    direction = product.contract_rows
    if product.precision == "default" or (exact and product.is_int8 and not direction):
        return "int8"
    needs_int8 = exact or product.format.float8 or direction or _block(product) % 16
    return "bfloat16" if product.is_all("bfloat16") and not needs_int8 else "int8x2"


def _tile_decoding(product: Product) -> str:
    """Return how tiles decode the weight: not at all (`bytes`), to exact int8 levels,
    by tables of floats or of int8 values, or value by value."""
    format = product.format
    if _is_exact_int8(product):
        return "bytes" if format.bits == 8 else "exact"
    if unpacked_bits(format) == 8 and product.blocks > 1:
        return "values"
    return "floats" if format.float8 else "tables"


@dataclasses.dataclass(frozen=True)
class Int8Kernel(NativeKernel):
    """A kernel for int8 instructions in registers: `int8` rounds activations to int8,
    and `int8x2` splits them into two int8 numbers."""

    @property
    def when(self) -> str:
        exact = "integer levels with one scale per row in `x @ w.T`"
        if self.arithmetic != "int8":
            return f'{exact}, `"high"`'
        return f'`"default"` or int8 activations: {exact}; `"default"`: many rows'

    def why_slower(self, product, library):
        if product.precision == "highest" or product.format.float8:
            return "int8 is not exact enough"
        if product.contract_rows:
            return "int8 registers add along rows of codes"
        if _is_exact_int8(product):
            if _rounds_to_int8(product) != (self.arithmetic == "int8"):
                return f"{self.arithmetic} is for another precision"
            # Rounding activations to int8x2 moves as many bytes as the product.
            one_bit = _is_thin(product) and product.format.bits == 1
            slow = _is_too_large(product) or (one_bit and product.m >= 2048)
            if self.arithmetic == "int8x2" and slow:
                return "a weight with few rows does not pay for rounding"
            return None
        if self.arithmetic != "int8" or product.precision != "default":
            return "the weight does not fit int8 exactly"
        # Decoding a row for all rows of the activation pays from this number on.
        fits_int16 = "vnni" in library.instructions and _fits_int16(product)
        if product.m < (16 if fits_int16 else 8) or product.size > longest_int8_sum:
            return "the weight is not decoded often enough"
        return None


def _bits_of(product: Product) -> int:
    """Return the bits of a code for thresholds."""
    bits = product.format.bits
    return 8 if unpacked_bits(product.format) == 8 else bits


def _is_thin(product: Product) -> bool:
    return product.rows <= 256


def _is_too_large(product: Product) -> bool:
    # The rounded activation is in fresh pages of memory, which the operating system
    # clears first. That does not pay for few rows of the weight.
    return _is_thin(product) and product.m * product.size >= 2**24


@dataclasses.dataclass(frozen=True)
class Int16Kernel(NativeKernel):
    """A kernel that multiplies int16 numbers.

    `least` is the number of rows from which it beats floats in `x @ w`, by the bits of
    a code.
    """

    least: dict[int, int]

    when = "blocked weights and codebooks; `x @ w`"

    def why_slower(self, product, library):
        if product.precision == "highest" or product.format.float8:
            return "int16 is not exact enough"
        if product.contract_rows:
            if _may_use_tiles(product, library):
                return "tiles or floats are faster"
            least = self.least[_bits_of(product)]
            if product.format.bits > 3 and product.rows * product.packed >= 2**22:
                least = 12
            if product.m < least or not _fits_panels(product):
                return f"int16 needs {least} rows of whole registers"
            return None
        if _is_exact_int8(product):
            return "int8 holds the weight"
        if not _fits_int16(product):
            return "blocks are not parts of 64 bytes"
        return "floats are faster" if self._is_slow(product) else None

    def _is_slow(self, product: Product) -> bool:
        # Rounding the activation does not pay for few rows of the weight.
        run = run_of(product)
        if product.size <= 512:
            most_rows, least = 384 if run <= 16 else 256, 48
        else:
            most_rows, least = 256, 256 if run <= 8 else 1024 if run <= 16 else math.inf
        is_slow = product.rows <= most_rows and product.m >= least
        return is_slow or _is_too_large(product)


def _fits_int16(product: Product) -> bool:
    """Return whether 64 bytes hold whole blocks, or a part of one."""
    block, blocks = _block(product), product.blocks
    in_lanes = blocks == 1 or block % 64 == 0 or (64 % block == 0 and block % 4 == 0)
    return in_lanes and (unpacked_bits(product.format) == 8 or run_of(product) % 2 == 0)


def _fits_vectors(product: Product) -> bool:
    """Return whether registers of sixteen bytes hold parts of a block, or two
    blocks."""
    block, blocks = _block(product), product.blocks
    return blocks == 1 or block % 16 == 0 or (block == 8 and blocks % 2 == 0)


def _fits_panels(product: Product) -> bool:
    """Return whether, in addition, rows are whole registers of sixteen bytes."""
    return _fits_vectors(product) and row_bytes(product) % 16 == 0


@dataclasses.dataclass(frozen=True)
class FloatKernel(NativeKernel):
    """A kernel for float32, which rounds nothing."""

    when = "everything else, unless XLA is faster"

    def why_slower(self, product, library):
        most_of = _most_contracted if product.contract_rows else _most_floats
        most = most_of(product, library)
        rounds = _rounds_to_int8(product) and product.precision != "highest"
        if _is_exact_int8(product) and rounds and not library.multiplies_int8:
            # XLA multiplies int8 codes without decoding them.
            most = min(most, 32) if product.format.bits == 8 else most
        if product.m <= most:
            return None
        return f"for {product.m} rows XLA is faster than the native kernels"


def _most_floats(product: Product, library: Library) -> int | float:
    """Return the number of rows up to which floats are faster than XLA in `x @ w.T`."""
    if not _fits_vectors(product) or product.format.group > 1024:
        return 128 if "avx512" in library.instructions else 64
    return 128 if product.precision == "default" and library.bfloat16 else math.inf


def _most_contracted(product: Product, library: Library) -> int | float:
    """Return the number of rows up to which floats are faster than XLA in `x @ w`."""
    holds_int8 = _is_exact_int8(product) and product.precision != "highest"
    without_int16 = library.multiplies_int8 and "vnni" not in library.instructions
    if holds_int8 and without_int16:
        return 8
    if not _fits_panels(product):
        return 64 if "avx512" in library.instructions else 16
    bits, is_float8 = _bits_of(product), product.format.float8 is not None
    rounds = product.precision == "default" and library.bfloat16
    if not rounds or _is_bound_by_writes(product) or (bits == 8 and not is_float8):
        return math.inf
    # XLA rounds both operands to bfloat16, which pays for many rows.
    return 512 if bits == 3 else 256


def _is_bound_by_writes(product: Product) -> bool:
    m, rows, columns = product.m, product.rows, product.columns
    narrow = m * columns >= 2**22 and rows < 1024
    return narrow or (m * rows >= 2**23 and columns < 512)


_AMX_ROWS = {
    "bfloat16": {"tables": (8, 8), "values": (12, 12)},
    "int8": {
        "bytes": (6, 4),
        "exact": (9, 3),
        "tables": (4, 4),
        "floats": (2, 3),
        "values": (9, 8),
    },
    "int8x2": {
        "bytes": (4, 4),
        "exact": (7, 3),
        "tables": (8, 6),
        "floats": (5, 5),
        "values": (13, 11),
    },
}
_INT16_ROWS = {1: 3, 2: 3, 3: 16, 4: 8, 8: 8}
# The first kernel that serves a product computes it.
KERNELS = (
    TileKernel("bfloat16", "amx", "3e-3", _AMX_ROWS["bfloat16"]),
    TileKernel("int8", "amx", "1.3e-2", _AMX_ROWS["int8"]),
    TileKernel("int8x2", "amx", "8e-5", _AMX_ROWS["int8x2"]),
    *(Int8Kernel("int8", name, "1e-2") for name in INT8_SETS),
    *(Int8Kernel("int8x2", name, "4e-5") for name in INT8_SETS),
    Int16Kernel("int16", "vnni", "5e-5", _INT16_ROWS),
    *(FloatKernel("float", name, "1e-6") for name in ("avx512", "avx2", "neon")),
)
