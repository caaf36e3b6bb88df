"""What is best on which GPU: estimated from what the compiler makes, not measured."""

import dataclasses

from ..._jax import gpu_capability, gpu_cores, gpus
from ...formats import Format
from ._lookup import in_table, is_signed
from ._table import size_of
from ._triton import subtile_bytes, Tiles


@dataclasses.dataclass(frozen=True)
class Chip:
    """What depends on the generation.

    - `cores`: how many there are, among which programs are spread; about, of a chip
        that is not here.
    - `shared`: bytes of shared memory that a program may have.
    - `large_products`: whether tensor cores read their operands from shared memory,
        and so keep registers free for more sums.
    - `slow_products`: whether tensor cores are so slow beside the other units that
        these decode for many rows while another warp multiplies.
    - `fast_memory`: whether XLA may as well write sums of integers, to scale them when
        it reads them again.
    """

    name: str
    cores: int
    shared: int
    large_products: bool = False
    slow_products: bool = False
    fast_memory: bool = False


# By compute capability. Others are served by XLA.
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
    """By compute capability, or the name of a chip that eqquant compiles for."""
    found = _chips.get(capability or _described.get(kind, ""))
    if found is not None and "GeForce" in kind:
        # Half as fast as others of the generation, if sums are in float32.
        return dataclasses.replace(found, slow_products=True)
    return found


def chip() -> tuple[Chip | None, str, bool]:
    """That which is compiled for, what it is called, and whether it is here."""
    kind, capability = gpu_capability()
    found = known(kind, capability)
    cores = gpu_cores() if capability is not None else None
    if found is not None and cores:
        found = dataclasses.replace(found, cores=cores)
    return found, kind, capability is not None


def is_large(chip: Chip, m: int, format: Format, as_it_is: str | None) -> bool:
    """Whether a product has tiles of 256 rows of the activation, if it is multiplied
    `as_it_is`, in that dtype. Codes are to be decoded in a few instructions, and no
    sums of blocks to be scaled, for which there are no registers."""
    if not chip.large_products or m <= 128 or format.block_size is not None:
        return False
    return as_it_is == "int8" or (as_it_is is not None and is_signed(format))


def hides_decoding(chip: Chip, m: int, format: Format, as_it_is: str | None) -> bool:
    """Whether a product of many rows hides what it decodes behind tensor cores, if both
    operands are multiplied `as_it_is`, in that dtype. Weights of blocks are scaled
    then, in bfloat16. Of a plane, tensor cores want 32 numbers at once, of eight planes
    there is no room for more than 16."""
    if not chip.slow_products or m <= 128 or as_it_is in (None, "int8"):
        return False
    if in_table(format) and format.bits < 4:
        return False  # Of these there are more planes than registers.
    if format.block_size is None:
        return True
    width = subtile_bytes(format, 32)
    return as_it_is == "bfloat16" and width >= (16 if format.bits == 1 else 32)


def tiles_for(
    chip: Chip,
    m: int,
    rows: int,
    packed: int,
    *,
    batch: int,
    format: Format,
    contract_rows: bool,
    itemsize: int,
    as_it_is: str | None = None,
    hides: bool = False,
) -> Tiles | None:
    """None if tensor cores cannot multiply what one scale is for. `itemsize` is that of
    the activation, and `as_it_is` its dtype if it is multiplied in it, unscaled;
    `hides` is what [`hides_decoding`][] says."""
    sizes = [size for size in (128, 64, 32, 16) if size < 2 * max(m, 16)]
    if is_large(chip, m, format, as_it_is):
        sizes = [256]
    if hides:
        sizes = [128]
    room = chip.shared - (size_of(format.bits) if in_table(format) else 0)
    candidates = [
        dataclasses.replace(tiles, stages=stages)
        for size in sizes
        for tiles in [_of_size(size, format, contract_rows, as_it_is == "int8", hides)]
        for stages in range(tiles.stages, 2, -1)
    ]
    fits = lambda tiles: _staged(tiles, format, contract_rows, itemsize) <= room
    tiles = next(filter(fits, candidates), candidates[-1])
    if tiles.bytes < 16:
        return None
    wide = tiles.bytes * tiles.subtiles
    size, free = (wide, packed) if contract_rows else (tiles.rows, rows)
    programs = -(-free // size) * -(-m // tiles.m) * batch
    # A few for each core, so that one decodes while another waits for its codes. But
    # sums of parts are written and read again, of as many rows as the activation has.
    target = chip.cores * (12 if m <= 4 else 8) // tiles.warps
    step, length = (tiles.rows, rows) if contract_rows else (wide, packed)
    least = 4 if format.bits < 4 and not contract_rows else 8
    split, few = 1, tiles.m == 16
    while few and programs * split < target and length // step // (2 * split) >= least:
        if length % step == 0 and length // step % (2 * split):
            break  # Some would have nothing to do in their last step.
        split *= 2
    return dataclasses.replace(tiles, split=split)


def _of_size(
    m: int, format: Format, contract_rows: bool, integers: bool, hides: bool
) -> Tiles:
    """Tiles of so many rows of the activation."""
    if hides:
        return _hiding(m, format)
    if m == 256:  # 128 codes of each row.
        return Tiles(m=m, rows=128, bytes=16 * format.bits, subtiles=1, warps=8)
    few = m == 16 and not contract_rows
    if integers and m == 128:  # Two programs to a core, each with long steps.
        return Tiles(m=m, rows=128, bytes=128, subtiles=1, warps=4)
    # For `x @ w` the activation is scaled again for each subtile: so these are wider.
    # For `x @ w.T` each plane has a load of the activation: so where there are many
    # planes, and few rows of it, they are, too.
    most = (128 if contract_rows else 64) if format.bits == 8 else 32
    if format.bits < 4 and few:
        most = 64
    width = subtile_bytes(format, most)
    subtiles = max(1, 64 // max(width, 1))
    short = width == 16 == (format.block_size or 0) * format.bits // 8
    short = short and not contract_rows
    if short and m <= 64:
        # Two blocks: narrower ones come to the order of tensor cores byte by byte.
        width, subtiles = 32, 2
    elif short:  # There are no registers for as many sums.
        subtiles = 2
    tiles = Tiles(
        m=m,
        rows=64 if contract_rows else 128,
        bytes=width,
        subtiles=1 if format.bits < 4 and not contract_rows else subtiles,
        warps=8 if (m == 128 and not integers) or (m == 64 and short) else 4,
        stages=5 if m == 128 and short else 3,
    )
    if in_table(format) and m <= 32 and not contract_rows:
        # More than 48 KiB: for that any launcher asks for as much as there is. XLA's
        # always does. JAX has another one, which does not know of the table.
        tiles = dataclasses.replace(tiles, stages=4)
    if in_table(format) and few:
        # More threads share a table.
        tiles = dataclasses.replace(tiles, rows=256, warps=8)
    return tiles


def _hiding(m: int, format: Format) -> Tiles:
    """Of integers of 8 bits two programs are on a core. Others take a core, as there is
    one table, or as many planes of the activation as a byte has codes."""
    wide = format.bits == 8
    return Tiles(
        m=m,
        rows=128 if wide else 256,
        bytes=subtile_bytes(format, 64 if wide else 32 if format.bits > 1 else 16),
        subtiles=1,
        warps=4 if wide else 8,
        scaled=format.block_size is not None,
    )


def _staged(tiles: Tiles, format: Format, contract_rows: bool, itemsize: int) -> int:
    """About how many bytes of shared memory there are for what is on its way."""
    codes = tiles.rows * tiles.bytes * tiles.subtiles
    columns = tiles.bytes * tiles.subtiles * 8 // format.bits
    x = tiles.m * (tiles.rows if contract_rows else columns) * itemsize
    if format.block_size is not None and not contract_rows:
        # For each block of a subtile once.
        x *= max(tiles.bytes * 8 // format.bits // format.block_size, 1)
    scales = 2 * tiles.rows * tiles.subtiles
    return (tiles.stages - 1) * (codes + x + scales) + 2048
