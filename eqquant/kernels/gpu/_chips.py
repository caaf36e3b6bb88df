"""What is best on which GPU: estimated from what the compiler makes, not measured."""

import dataclasses

from ..._jax import gpu_capability, gpus
from ...formats import Format
from ._lookup import is_signed
from ._triton import subtile_bytes, Tiles


@dataclasses.dataclass(frozen=True)
class Chip:
    """What depends on the generation.

    - `cores`: about how many there are, among which programs are spread.
    - `large_products`: whether tensor cores read their operands from shared memory,
        and so keep registers free for more sums.
    """

    name: str
    cores: int
    large_products: bool = False


# By compute capability. Others are served by XLA.
_chips = {
    "8.0": Chip("sm_80", cores=108),
    "8.6": Chip("sm_86", cores=84),
    "8.9": Chip("sm_89", cores=128),
    "9.0": Chip("sm_90", cores=132, large_products=True),
}
_described = {
    gpu.name: ".".join(gpu.architecture.removeprefix("sm_").rstrip("a"))
    for gpu in gpus.values()
}


def known(kind: str, capability: str | None = None) -> Chip | None:
    """By compute capability, or the name of a chip that eqquant compiles for."""
    return _chips.get(capability or _described.get(kind, ""))


def chip() -> tuple[Chip | None, str, bool]:
    """That which is compiled for, what it is called, and whether it is here."""
    kind, capability = gpu_capability()
    return known(kind, capability), kind, capability is not None


def is_large(chip: Chip, m: int, format: Format, as_it_is: str | None) -> bool:
    """Whether a product has tiles of 256 rows of the activation, if it is multiplied
    `as_it_is`, in that dtype. Codes are to be decoded in a few instructions, and no
    sums of blocks to be scaled, for which there are no registers."""
    if not chip.large_products or m <= 128 or format.block_size is not None:
        return False
    return as_it_is == "int8" or (as_it_is is not None and is_signed(format))


def tiles_for(
    chip: Chip,
    m: int,
    rows: int,
    packed: int,
    *,
    batch: int,
    format: Format,
    contract_rows: bool,
    as_it_is: str | None = None,
) -> Tiles | None:
    """None if tensor cores cannot multiply what one scale is for. `as_it_is` is the
    dtype of an activation that is multiplied in it, unscaled."""
    large, integers = is_large(chip, m, format, as_it_is), as_it_is == "int8"
    # For `x @ w` the activation is scaled again for each subtile: so these are wider.
    most = (128 if contract_rows else 64) if format.bits == 8 else 32
    width = subtile_bytes(format, most)
    if width < 16:
        return None
    most_m = 256 if large else 128
    tile_m = next(
        size for size in (16, 32, 64, 128, 256) if m <= size or size == most_m
    )
    few = tile_m == 16
    if contract_rows:
        tile_rows, subtiles = 64, max(1, 64 // width)
    else:
        tile_rows, subtiles = 128, max(1, 64 // width)
        if format.bits < 4:
            subtiles = 1
    size, free = (width * subtiles, packed) if contract_rows else (tile_rows, rows)
    programs = -(-free // size) * -(-m // tile_m) * batch
    # A few for each core, so that one decodes while another waits for its codes. But
    # sums of parts are written and read again, of as many rows as the activation has.
    target = chip.cores * (3 if m <= 4 else 2)
    step, length = (tile_rows, rows) if contract_rows else (width * subtiles, packed)
    split = 1
    while few and programs * split < target and length // step // (2 * split) >= 8:
        if length % step == 0 and length // step % (2 * split):
            break  # Some would have nothing to do in their last step.
        split *= 2
    warps, stages = 8 if tile_m >= 128 else 4, 3
    if large:
        # 128 codes of each row.
        width, subtiles = 16 * format.bits, 1
    elif integers and tile_m == 128:
        warps, stages = 4, 4
    return Tiles(
        m=tile_m,
        rows=tile_rows,
        bytes=width,
        subtiles=subtiles,
        split=split,
        warps=warps,
        stages=stages,
    )
