"""FP8 and int8 weights times scales, as compressed-tensors, vLLM and Hugging Face's
fine-grained FP8 store them.

`weight` is `(outputs, inputs)`. `weight_scale` or `weight_scale_inv` holds one scale,
one scale per output, or one scale per tile of 128 outputs and 128 inputs. Both multiply
the weight, in spite of the name. `config.json` may have the size of tiles.
"""

from typing import Any

import numpy as np

from ...formats import FP8, Int8
from ..files import Source
from ._entry import Entry, from_levels, NotExact
from ._parts import find_parts, Parts, SCALE_DTYPES


_formats = {"float8_e4m3fn": FP8, "int8": Int8}
_tile = 128


def scaled_byte_entries(source: Source) -> dict[str, Entry]:
    found = [
        (parts, name)
        for name in ("weight_scale", "weight_scale_inv")
        for parts in find_parts(source, name, "bytes with scales")
        if "weight" in parts and parts.tensor("weight").dtype.name in _formats
    ]
    others = _other_tiles(source.config()) if found else []
    return {parts.weight: _entry(parts, name, others) for parts, name in found}


def _other_tiles(config: Any) -> list[Any]:
    """Return the sizes of tiles in a configuration that are not 128 x 128."""
    get = lambda values, name: values.get(name) if isinstance(values, dict) else None
    settings = get(config, "quantization_config")
    groups = get(settings, "config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    sizes = [get(settings, "weight_block_size")]
    sizes += [get(get(group, "weights"), "block_structure") for group in groups]
    return [size for size in sizes if size not in (None, [_tile, _tile])]


def _entry(parts: Parts, name: str, other_tiles: list[Any]) -> Entry:
    stored = parts.look_up("weight", tuple(_formats), (None, None))
    rows, columns = stored.shape
    if not rows or not columns:
        parts.fail(f"is empty: its shape is {stored.shape}.")
    tiles = -(-rows // _tile), -(-columns // _tile)
    untiled = (), (1,), (1, 1), (rows,), (rows, 1)
    scale = parts.look_up(name, SCALE_DTYPES, *untiled, tiles)
    is_tiled = scale.shape not in untiled
    if is_tiled and other_tiles:
        parts.fail(
            f"has tiles of {other_tiles[0]!r} in config.json; eqquant reads tiles of "
            f"{_tile} x {_tile}."
        )
    format = _formats[stored.dtype.name](block_size=_tile if is_tiled else None)

    def scales() -> np.ndarray:
        stored_scales = parts.read(name).astype(np.float32)
        if is_tiled:
            return np.repeat(stored_scales, _tile, axis=0)[:rows]
        return np.broadcast_to(stored_scales.reshape(-1, 1), (rows, 1))

    def decode() -> np.ndarray:
        width = _tile if is_tiled else columns
        factors = np.repeat(scales(), width, axis=1)[:, :columns]
        with np.errstate(over="ignore", invalid="ignore"):
            values = parts.read("weight").astype(np.float32) * factors
            return values.astype(scale.dtype)

    def quantized():
        levels = parts.read("weight")
        if isinstance(format, FP8):
            if np.any(np.isnan(levels)):
                raise NotExact("has weights that are NaN.")
            levels = levels.view(np.uint8)
        return from_levels(levels, scales(), format, scale.dtype)

    kind = f"bytes with scales, {format!r}", True
    return parts.entry(stored.shape, scale.dtype, decode, quantized, kind)
