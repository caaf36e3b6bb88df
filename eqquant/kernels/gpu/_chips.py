"""The tuned parameters of each GPU generation: measured on an H200, and for the others
estimated from compiled code."""

import dataclasses
import functools as ft
import math

from ..._jax import gpu_capability, gpu_cores, gpus
from ...formats import Format, is_in_two_parts, planes_of
from .._product import Product
from ._lookup import in_table, is_signed, table_bytes
from ._triton import planes_in, row_bytes, subtile_bytes, Tiles, unit_bytes


@dataclasses.dataclass(frozen=True)
class Chip:
    """The properties of a GPU generation that kernels depend on.

    - `cores`: streaming multiprocessors. The number is approximate for chips that are
        not present.
    - `shared`: bytes of shared memory per program.
    - `large_products`: whether tensor cores read operands from shared memory, which
        leaves more registers for accumulators.
    - `slow_products`: whether tensor cores are slow enough that other warps can decode
        a weight for many rows while one multiplies.
    - `fast_memory`: whether memory is fast enough for XLA to write integer sums and to
        scale them in another kernel.
    """

    name: str
    cores: int
    shared: int
    large_products: bool = False
    slow_products: bool = False
    fast_memory: bool = False


# The keys are compute capabilities. XLA serves all others.
_chips = {
    "8.0": Chip("sm_80", cores=108, shared=163 * 1024, fast_memory=True),
    "8.6": Chip("sm_86", cores=84, shared=99 * 1024),
    "8.9": Chip("sm_89", cores=128, shared=99 * 1024),
    "9.0": Chip("sm_90", cores=132, shared=227 * 1024, large_products=True),
}
_described = {
    gpu.name: ".".join(gpu.architecture.removeprefix("sm_").rstrip("a"))
    for gpu in gpus.values()
}


def known(kind: str, capability: str | None = None) -> Chip | None:
    """Return the chip with a compute capability, or with the name of a described
    chip."""
    found = _chips.get(capability or _described.get(kind, ""))
    if found is not None and "GeForce" in kind:
        # Float32 accumulation is half as fast as on other chips of the generation.
        return dataclasses.replace(found, slow_products=True)
    return found


def chip() -> tuple[Chip | None, str, bool]:
    """Return the target chip, its name, and whether it is present."""
    kind, capability = gpu_capability()
    found = known(kind, capability)
    cores = gpu_cores() if capability is not None else None
    if found is not None and cores:
        found = dataclasses.replace(found, cores=cores)
    return found, kind, capability is not None


def matrix_units() -> tuple[str, ...]:
    """Return the narrow numbers that the tensor cores of the target chip multiply."""
    kind, capability = gpu_capability()
    capability = capability or _described.get(kind, "0.0")
    has_float8 = tuple(map(int, capability.split("."))) >= (8, 9)
    return ("int8", "float8") if has_float8 else ("int8",)


def is_large(chip: Chip, product: Product, native: str | None) -> bool:
    """Return whether tiles have 256 rows of the activation.

    This requires an activation that is multiplied in its own dtype, `native`, cheap
    decoding, and no blocks: there are no registers for separate sums of blocks.
    """
    format = product.format
    many = chip.large_products and product.m > 128
    if not many or native is None or format.block_size is not None:
        return False
    return native == "int8" or is_signed(format)


def hides_decoding(chip: Chip, product: Product, native: str | None) -> bool:
    """Return whether tensor cores hide the decoding of a product of many rows.

    This requires operands that are multiplied in their own dtype, `native`. Weights
    with blocks are scaled in bfloat16. Tensor cores need 32 numbers per plane; with
    eight planes there are registers for 16.
    """
    format = product.format
    if not chip.slow_products or product.m <= 128 or native in (None, "int8"):
        return False
    if product.x.dtype != product.weight_dtype:
        return False
    if format.history or is_in_two_parts(format.bits):
        return False
    if in_table(format) and format.bits < 4:
        return False  # There are not enough registers for these planes.
    if format.block_size is None:
        return True
    width = subtile_bytes(format, 32)
    return native == "bfloat16" and width >= (16 if format.bits == 1 else 32)


def tiles_for(
    chip: Chip,
    product: Product,
    native: str | None = None,
    parts: tuple[int, int] = (1, 1),
) -> Tiles | None:
    """Return tiles for a product, or None if blocks are too short for tensor cores.

    `native` is the dtype of the activation if it is multiplied unscaled in that dtype.
    `parts` is the number of operands whose sum is the activation, or the weight.
    """
    format, m = product.format, product.m
    integers = native == "int8"
    of_size = ft.partial(_of_size, product=product, integers=integers)
    if is_large(chip, product, native):
        sizes = [256]
    elif format.history:
        sizes = [size for size in (128, 64, 32, 16) if size < 2 * max(m, 16)]
        of_size = ft.partial(_of_words, product=product, chip=chip)
    elif hides_decoding(chip, product, native):
        sizes, of_size = [128], ft.partial(_hiding, format=format)
    else:
        sizes = [size for size in (128, 64, 32, 16) if size < 2 * max(m, 16)]
        if _has_long_rows(chip, product, native, parts):
            of_size = ft.partial(_of_long_rows, product=product, integers=integers)
    room = chip.shared - table_bytes(format)
    candidates = [
        dataclasses.replace(tiles, stages=stages)
        for tiles in map(of_size, sizes)
        for stages in range(tiles.stages, 2, -1)
    ]
    fits = lambda tiles: _staged(tiles, product) <= room
    tiles = next(filter(fits, candidates), candidates[-1])
    if tiles.bytes < 16:
        return None
    return dataclasses.replace(tiles, split=_split_of(tiles, chip, product))


def _split_of(tiles: Tiles, chip: Chip, product: Product) -> int:
    """Return the number of programs that share a sum.

    Several programs per core overlap decoding with loads. Partial sums cost memory
    traffic in proportion to the rows of the activation, and a kernel that adds them.
    """
    contract_rows = product.contract_rows
    if tiles.m > (64 if chip.large_products else 16):
        return 1
    axes = (product.rows, tiles.rows), (row_bytes(product), tiles.step_bytes)
    (length, step), (free, tile) = axes if contract_rows else axes[::-1]
    tiles_m = -(-product.m // tiles.m)
    programs = -(-free // tile) * tiles_m * math.prod(product.batch)
    if chip.large_products and not contract_rows and tiles.subtiles == 1:
        each, least = 4, 4  # Loads of long rows need fewer programs.
    else:
        each = 12 if product.m <= 4 else 8
        least = 4 if product.format.bits < 4 and not contract_rows else 8
    target = chip.cores * each // tiles.warps
    split = 1
    while programs * split < target and length // step // (2 * split) >= least:
        if length % step == 0 and length // step % (2 * split):
            break  # Some programs would have no last step.
        split *= 2
    return split


def _has_long_rows(
    chip: Chip, product: Product, native: str | None, parts: tuple[int, int]
) -> bool:
    """Return whether a product of few rows uses [`_of_long_rows`][]."""
    if not chip.large_products or product.contract_rows or parts != (1, 1):
        return False
    # Scales multiply the weight in bfloat16.
    return product.blocks == 1 or native != "float16"


def _of_long_rows(m: int, product: Product, integers: bool) -> Tiles:
    """Return tiles that read at least 64 bytes of a row at once. On an H200, this takes
    60% of the time of tiles with rows of 32 bytes."""
    format, blocked = product.format, product.blocks > 1
    rows, size, warps, stages = 64, 128, 4, 3
    if in_table(format) and m <= 32:
        stages = 4  # More than 48 KiB, as in `_of_size`.
    if integers:
        stages = 4
    elif format.bits == 8 and not blocked:
        rows, warps = (128, 8) if m == 64 else (64, 4)
        stages = 4 if m <= 64 else 3
    elif format.bits == 4 and m == 16 and (format.block_size or 64) >= 64:
        # There are not enough registers for the scales of shorter blocks.
        size, stages = 256, 3
    elif format.bits in (4, 5, 6) and m == 64:
        rows, warps = 128, 8
    elif format.bits in (4, 5, 6) and m == 128:
        size = 64
    elif format.bits == 1 and m == 64:
        rows, size, warps, stages = 256, 32, 8, 4
    elif format.bits < 4 and product.m > 4:
        # The activation takes more bytes than the codes. Codes in two parts need more
        # registers.
        rows, size = 128, 32 if format.bits == 3 and m == 128 else 64
    if blocked:
        block = row_bytes(product) // product.blocks
        size = size if size % block == 0 else math.gcd(size, block)
    return Tiles(m, rows, size, 1, 1, warps, stages, scaled=blocked)


def _of_size(m: int, product: Product, integers: bool) -> Tiles:
    """Return tiles with `m` rows of the activation. `integers` is whether operands are
    int8."""
    format, contract_rows = product.format, product.contract_rows
    if m == 256:  # 128 codes of each row.
        return Tiles(m=m, rows=128, bytes=16 * format.bits, subtiles=1, warps=8)
    few = m == 16 and not contract_rows
    if integers and m == 128:  # Two programs per core, each with long steps.
        return Tiles(m=m, rows=128, bytes=128, subtiles=1, warps=4)
    # For `x @ w` the activation is scaled once per subtile, so wide subtiles pay. For
    # `x @ w.T` it is loaded once per plane, so they pay for many planes and few rows.
    most = (128 if contract_rows else 64) if format.bits == 8 else 32
    if format.bits < 4 and few:
        most = 64
    width = subtile_bytes(format, most)
    subtiles = max(1, 64 // max(width, 1))
    block = (format.block_size or 0) // planes_of(format.bits)
    short = width == block and width in (8, 16) and not contract_rows
    if short and width == 16 and m <= 64:
        # Two blocks: Triton would permute narrower subtiles byte by byte.
        width, subtiles = 32, 2
    elif short:  # There are not enough registers for more accumulators.
        width, subtiles = 16, 1 if width == 8 and m == 128 else 2
    tiles = Tiles(
        m=m,
        rows=64 if contract_rows else 128,
        bytes=width,
        subtiles=1 if format.bits < 4 and not contract_rows else subtiles,
        warps=8 if (m == 128 and not integers) or (m == 64 and short) else 4,
        stages=5 if m == 128 and short else 3,
    )
    shared = in_table(format) or planes_of(format.bits) > 4
    if contract_rows and width == m == 16 and not shared:
        # Other warps would decode the same narrow subtile again. Tables and eight
        # planes need the shared memory or the registers of several warps.
        tiles = dataclasses.replace(
            tiles, subtiles=4 // planes_of(format.bits), warps=1
        )
    if in_table(format) and m <= 32 and not contract_rows:
        # Above 48 KiB, every launcher requests the maximum of shared memory. XLA's
        # always does. JAX's launcher ignores the static memory of the table.
        tiles = dataclasses.replace(tiles, stages=4)
    if in_table(format) and few:
        # More threads share the table.
        tiles = dataclasses.replace(tiles, rows=256, warps=8)
    return tiles


def _of_words(m: int, product: Product, chip: Chip) -> Tiles:
    """Return tiles for codes with a history, in words.

    They have few instructions per weight and spill no registers. For `x @ w`, two warps
    would decode the same 16 words. On an H200, programs of two warps take 7 to 9% less
    time for one row.
    """
    width = subtile_bytes(product.format, 32 if m <= 32 else 16)
    rows, warps = 64, 4
    if product.contract_rows and m == width == 16:
        rows, warps = 16, 1
    elif m == 16 and chip.large_products and not product.contract_rows:
        warps = 2
    elif width == 16 and not product.contract_rows and m < 128:
        rows, warps = 128, 8 if m == 64 else 4
    return Tiles(m=m, rows=rows, bytes=width, subtiles=1, warps=warps)


def _hiding(m: int, format: Format) -> Tiles:
    """Return tiles for [`hides_decoding`][]. Two programs with int8 codes run per core.
    Other formats run one, because of the table or the planes of the activation."""
    wide = format.bits == 8
    return Tiles(
        m=m,
        rows=128 if wide else 256,
        bytes=subtile_bytes(format, 64 if wide else 32 if format.bits > 1 else 16),
        subtiles=1,
        warps=4 if wide else 8,
        scaled=format.block_size is not None,
    )


def _staged(tiles: Tiles, product: Product) -> int:
    """Return an estimate of the bytes of shared memory for pipelined loads."""
    format, contract_rows = product.format, product.contract_rows
    codes = tiles.rows * tiles.step_bytes
    columns = tiles.step_bytes * planes_in(format)
    if is_in_two_parts(format.bits):
        codes *= 2
    if format.history:  # And the words before.
        codes *= 2 * unit_bytes(format)
    x = tiles.m * (tiles.rows if contract_rows else columns) * product.x.dtype.itemsize
    blocks = 1
    if format.block_size is not None and not contract_rows:
        columns_of_subtile = tiles.bytes * planes_in(format)
        blocks = max(columns_of_subtile // format.block_size, 1)
    if not tiles.scaled:  # One copy per block of a subtile.
        x *= blocks
    scales = 2 * tiles.rows * tiles.subtiles * blocks
    return (tiles.stages - 1) * (codes + x + scales) + 2048
