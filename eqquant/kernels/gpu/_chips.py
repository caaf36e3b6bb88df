"""What is best on which GPU: estimated from what the compiler makes, not measured."""

import dataclasses

from ..._jax import gpu_capability, gpus
from ...formats import Format
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


def tiles_for(
    chip: Chip,
    m: int,
    rows: int,
    packed: int,
    *,
    batch: int,
    format: Format,
    contract_rows: bool,
    integers: bool = False,
) -> Tiles | None:
    """None if tensor cores cannot multiply what one scale is for. With `integers`,
    codes are multiplied as they are."""
    # For `x @ w` the activation is scaled again for each subtile: so these are wider.
    most = (128 if contract_rows else 64) if format.bits == 8 else 32
    width = subtile_bytes(format, most)
    if width < 16:
        return None
    if integers and chip.large_products:
        width = 128
    most_m = 256 if integers and chip.large_products else 128
    tile_m = next(size for size in (16, 32, 64, 128, 256) if m <= size or size == most_m)
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
    warps, stages = 8 if tile_m == 128 else 4, 3
    if integers and tile_m >= 128:
        warps, stages = (8, 3) if tile_m == 256 else (4, 4)
    return Tiles(
        m=tile_m,
        rows=tile_rows,
        bytes=width,
        subtiles=subtiles,
        split=split,
        warps=warps,
        stages=stages,
    )
