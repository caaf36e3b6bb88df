"""Which products get a native kernel, and which one."""

import math

import jax.numpy as jnp

from ...formats import Format, num_codes
from .._compute import Compute, Precision
from .._int8 import rounding
from ..xla import longest_int8_sum
from ._library import Library, load


def choose_kernel(
    x,
    codes,
    scales,
    *,
    format: Format,
    contract_rows: bool,
    compute: Compute,
    weight_dtype,
    **_,
) -> str | None:
    """Which kernel a product gets, by the shapes and dtypes of its operands; `None` if
    XLA's own are faster. Errors are relative (Frobenius norm), on normal activations
    and weights:

    - `"float, AVX-512"` (AVX2, NEON): weights exact, multiplied in float32. 1e-6.
    - `"two digits, VNNI"` (AMX, dotprod, i8mm): weights exact, activations in two
        int8, which is 15 bits of them. 4e-5. AMX has weights with a scale for each
        block, and floats of 8 bits, in two int8, too, which is 15 bits of the largest
        of a row, or in `x @ w` of a block in some rows. 8e-5.
    - `"one digit, VNNI"` (AMX, dotprod, i8mm): activations rounded to int8. 1e-2; for
        weights with a scale for each block these, too, to 127 of that largest one.
        1.3e-2.
    - `"words, VNNI"`: activations rounded to 16 bits, and levels to 15, or for many
        rows and in `x @ w` weights with a scale for each block to 16. 5e-5.
    - `"bfloat16, AMX"`: both rounded to bfloat16. 3e-3.
    """
    library = load()
    assert not isinstance(library, str), library
    precision = compute.precision
    m, size = x.shape[-2:]
    rows, blocks = codes.shape[-2], scales.shape[-1]
    packed = row_bytes(codes.shape[-1], format)
    vnni, amx = (s in library.instructions for s in ("vnni", "amx"))
    floats = f"float, {_best_of(library, _of_floats)}"
    integers = _best_of(library, _of_integers)
    exact = format.integer_levels and blocks == 1 and size <= longest_int8_sum
    rounded = precision == "default" or x.dtype == jnp.int8
    if amx and precision != "highest" and _fits_tiles(packed, blocks, format):
        one = precision == "default" or (exact and rounded and not contract_rows)
        how = "one digit" if one else "two digits"
        narrow = all(jnp.dtype(d) == jnp.bfloat16 for d in (x.dtype, weight_dtype))
        digits = exact or format.float8 or contract_rows or packed // blocks % 16
        if narrow and how == "two digits" and not digits:
            how = "bfloat16"
        if m >= _least_in_tiles(how, exact, contract_rows, blocks, format):
            return f"{how}, AMX"
    elif contract_rows and _contracts_in_words(
        library, m, codes, blocks, format, precision
    ):
        return "words, VNNI"
    if contract_rows:
        most = _most_contracted(library, m, codes, blocks, format, precision, exact)
    else:
        most = _most_floats(library, packed, blocks, format, precision)
    if exact and rounded and integers is None and precision != "highest":
        # XLA has products of int8 for these. Codes of fewer bits it decodes first.
        most = min(most, 32) if format.bits == 8 else most
    as_floats = floats if m <= most else None
    if precision == "highest" or format.float8 or contract_rows or integers is None:
        return as_floats
    # The integers that so large an activation becomes are in fresh pages of memory,
    # which the operating system fills first: in vain for few rows of the weight.
    thin = rows <= 256
    too_large = thin and m * size >= 2**24
    if exact:
        many_bits = thin and format.bits == 1 and m >= 2048
        if not rounded and (too_large or many_bits):
            return as_floats
        how = "one digit" if rounded else "two digits"
        return f"{how}, {integers}"
    words = vnni and _fits_words(packed, blocks, format)
    # To decode a row for all of the activation pays from so many on.
    many = m >= (16 if words else 8)
    if precision == "default" and many and size <= longest_int8_sum:
        return f"one digit, {integers}"
    # For so few rows of the weight to round the activation is not worth it.
    run = run_of(codes.shape[-1], format)
    if size <= 512:
        in_vain = rows <= (384 if run <= 16 else 256) and m >= 48
    else:
        least = 256 if run <= 8 else 1024 if run <= 16 else math.inf
        in_vain = rows <= 256 and m >= least
    if words and not (in_vain or too_large):
        return "words, VNNI"
    return as_floats


def _most_floats(
    library: Library, packed: int, blocks: int, format: Format, precision: Precision
) -> int | float:
    """Up to how many rows of the activation floats are faster than what XLA has."""
    block = packed // blocks
    in_vectors = blocks == 1 or block % 16 == 0 or (block == 8 and blocks % 2 == 0)
    if not in_vectors or format.group > 1024:
        return 128 if "avx512" in library.instructions else 64
    if precision == "default" and library.bfloat16:
        return 128
    return math.inf


def _most_contracted(
    library: Library,
    m: int,
    codes,
    blocks: int,
    format: Format,
    precision: Precision,
    exact: bool,
) -> int | float:
    """The same where the rows of the weight are contracted."""
    rows, stored = codes.shape[-2:]
    columns = num_codes(stored, format.bits)
    integers = exact and precision != "highest" and _best_of(library, _of_integers)
    if integers and "vnni" not in library.instructions:
        return 8
    if not _fits_panels(row_bytes(stored, format), blocks):
        return 64 if "avx512" in library.instructions else 16
    if precision != "default":
        return math.inf
    # XLA rounds both operands to int8 or bfloat16, which pays for many rows, if not
    # most of the time goes to what it writes to memory.
    if (m * columns >= 2**22 and rows < 1024) or (m * rows >= 2**23 and columns < 512):
        return math.inf
    if format.bits == 8 and not format.float8:
        return math.inf
    return (512 if format.bits == 3 else 256) if library.bfloat16 else math.inf


def _contracts_in_words(
    library: Library, m: int, codes, blocks: int, format: Format, precision: Precision
) -> bool:
    """Whether words of 16 bits are fastest where the rows of the weight are contracted,
    by no tiles."""
    vnni = "vnni" in library.instructions
    if not vnni or precision == "highest" or format.float8:
        return False
    rows, stored = codes.shape[-2:]
    if format.bits < 3:
        least = 3
    elif format.bits == 3:
        least = 16
    else:
        least = 12 if rows * stored >= 2**22 else 8
    return m >= least and _fits_panels(row_bytes(stored, format), blocks)


def _least_in_tiles(
    how: str, exact: bool, contract_rows: bool, blocks: int, format: Format
) -> int:
    """From how many rows on tiles are faster than registers. What registers multiply is
    decoded in these; what tiles do, once for all rows."""
    if exact:
        weight = "bytes" if format.bits == 8 else "exact"
    elif format.bits == 8 and blocks > 1:
        weight = "one by one"
    else:
        weight = "floats" if format.float8 else "tables"
    return _least[how, weight][contract_rows]


# How the weight is decoded: not at all, to levels that are bytes, by tables of digits,
# or each value by itself. The first number is for `x @ w.T`, the second for `x @ w`.
_least = {
    ("two digits", "bytes"): (4, 4),
    ("two digits", "exact"): (7, 3),
    ("two digits", "tables"): (8, 6),
    ("two digits", "floats"): (5, 5),
    ("two digits", "one by one"): (13, 11),
    ("one digit", "bytes"): (6, 4),
    ("one digit", "exact"): (9, 3),
    ("one digit", "tables"): (4, 4),
    ("one digit", "floats"): (2, 3),
    ("one digit", "one by one"): (9, 8),
    ("bfloat16", "tables"): (8, 8),
    ("bfloat16", "one by one"): (12, 12),
}

# Kernels of floats, and of int8 products, by their instructions; the best ones first.
_of_floats = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
_of_integers = {"vnni": "VNNI", "i8mm": "i8mm", "dotprod": "dotprod"}


def _best_of(library: Library, kernels: dict[str, str]) -> str | None:
    found = (name for s, name in kernels.items() if s in library.instructions)
    return next(found, None)


def _fits_tiles(packed: int, blocks: int, format: Format) -> bool:
    """Whether sixteen bytes are of one block, or of two that have tables."""
    block = packed // blocks
    return blocks == 1 or block % 16 == 0 or (block == 8 and format.bits < 8)


def _fits_panels(packed: int, blocks: int) -> bool:
    """Whether rows are whole registers of sixteen bytes, parts of a block or two."""
    block = packed // blocks
    in_blocks = blocks == 1 or block % 16 == 0 or (block == 8 and blocks % 2 == 0)
    return in_blocks and packed % 16 == 0


def _fits_words(packed: int, blocks: int, format: Format) -> bool:
    """Whether 64 bytes hold whole blocks, or a part of one."""
    block = packed // blocks
    in_lanes = blocks == 1 or block % 64 == 0 or (64 % block == 0 and block % 4 == 0)
    return in_lanes and (format.bits == 8 or run_of(packed, format) % 2 == 0)


def describe(x, codes, scales, **params) -> str:
    """The kernel that a product gets, in words, and how it rounds activations."""
    kernel = choose_kernel(x, codes, scales, **params)
    assert kernel is not None
    how, _, _ = kernel.partition(", ")
    bits = {"two digits": 15, "one digit": 8, "words": 16}
    return f"native kernel {kernel!r} {rounding(x, bits.get(how))}"


def why_not(x, codes, scales, *, format: Format, weight_dtype, **params) -> str | None:
    """Why a product has no native kernel, if it has none."""
    library = load()
    if isinstance(library, str):
        return library
    for dtype in (x.dtype, weight_dtype, scales.dtype):
        if jnp.dtype(dtype).itemsize > 4:
            return f"native kernels compute in float32 at most, not in {dtype}"
    if 0 in (*x.shape, *codes.shape):
        return "there is nothing to multiply"
    if format.bits == 8 and not (format.integer_levels or format.float8):
        return f"there are no native kernels for codes like those of {format.name}"
    packed, blocks = row_bytes(codes.shape[-1], format), scales.shape[-1]
    if blocks > 1 and packed // blocks < 8:
        return f"blocks of {format.block_size} are shorter than a register"
    params |= {"format": format, "weight_dtype": weight_dtype}
    if choose_kernel(x, codes, scales, **params) is None:
        return f"for {x.shape[-2]} rows XLA is faster than the native kernels"
    return None


def run_of(packed: int, format: Format) -> int:
    """Bytes of a row, as the kernels get it, whose codes of one plane follow each
    other."""
    return packed if format.bits == 8 else format.group * _bits_unpacked(format) // 8


def _bits_unpacked(format: Format) -> int:
    """Of each code in the kernels, which unpack three bits to four."""
    return 4 if format.bits == 3 else format.bits


def row_bytes(packed: int, format: Format) -> int:
    """Of a row as the kernels get it, for so many that are stored."""
    return packed * _bits_unpacked(format) // format.bits
