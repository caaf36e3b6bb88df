"""Weights of MLX: codes in uint32, densely packed along rows, the first in the lowest
bits.

The mode `affine` has `scales` and `biases` with one row per output: `value = code *
scale + bias`. The modes `mxfp4` and `nvfp4` have 8-bit `scales` only. `quantization` in
`config.json` has the mode, the bits and the group size, and other values for single
layers.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import Format, Int2, Int3, Int4, Int5, Int6, Int8
from ..files import Source
from ._entry import Entry, from_levels, have_exact_products
from ._fp4 import mxfp4_entry, nvfp4_entry
from ._packed import unpack_int32
from ._parts import find_parts, Parts, SCALE_DTYPES


_formats: dict[int, type[Format]] = {
    **{2: Int2, 3: Int3, 4: Int4, 5: Int5, 6: Int6, 8: Int8}
}
_groups_of_modes = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,)}


def mlx_entries(source: Source) -> dict[str, Entry]:
    found = [
        parts
        for parts in find_parts(source, "scales", "MLX")
        if "weight" in parts and parts.tensor("weight").dtype == np.uint32
    ]
    if not found:
        return {}
    config = source.config()
    settings = None if config is None else config.get("quantization")
    if not isinstance(settings, dict):
        raise ValueError(
            f"{source.path}: has weights packed by MLX, but no config.json with "
            "'quantization' beside it, which specifies the bits and the group size."
        )
    return {parts.weight: _entry(parts, settings) for parts in found}


def _entry(parts: Parts, settings: dict[str, Any]) -> Entry:
    own = settings.get(parts.weight.removesuffix(".weight"))
    settings = settings | own if isinstance(own, dict) else settings
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _groups_of_modes:
        parts.fail(f"has the mode {mode!r}, not one of {', '.join(_groups_of_modes)}.")
    bits, group = (settings.get(name, 0) for name in ("bits", "group_size"))
    allowed = tuple(_formats) if mode == "affine" else (4,)
    if bits not in allowed or group not in _groups_of_modes[mode]:
        parts.fail(
            f"has {bits!r} bits and the group size {group!r} in config.json; the mode "
            f"{mode!r} has {allowed} bits and groups of {_groups_of_modes[mode]}."
        )
    rows, words = parts.look_up("weight", ("uint32",), (None, None)).shape
    columns = words * 32 // bits
    if not rows or not columns or columns % group or columns * bits != words * 32:
        parts.fail(f"has {words} words per row, which groups of {group} do not divide.")
    shape, grid = (rows, columns), (rows, columns // group)
    if mode == "affine":
        return _affine(parts, shape, grid, bits, group)
    parts.look_up("scales", ("uint8",), grid)
    packed = lambda: parts.read("weight").view(np.uint8)
    if mode == "mxfp4":
        read = lambda: (packed(), parts.read("scales"))
        return mxfp4_entry(parts, shape, read, "MLX, MXFP4(block_size=32)")
    float8 = lambda: parts.read("scales").view(jnp.float8_e4m3fn)
    read = lambda: (packed(), float8(), np.ones(1, np.float32))
    return nvfp4_entry(parts, shape, read, "MLX, NVFP4(block_size=16)")


def _affine(
    parts: Parts, shape: tuple[int, int], grid: tuple[int, int], bits: int, group: int
) -> Entry:
    dtype = parts.look_up("scales", SCALE_DTYPES, grid).dtype
    parts.look_up("biases", (dtype.name,), grid)

    def read():
        codes = unpack_int32(parts.read("weight").view(np.int32), bits, 1)
        scales, biases = (parts.read(name) for name in ("scales", "biases"))
        return codes, scales.astype(np.float32), biases.astype(np.float32)

    def decode() -> np.ndarray:
        codes, scales, biases = read()
        out = np.empty((*grid, group), dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for i, row in enumerate(codes.reshape(out.shape)):
                values = row * scales[i, :, None]
                values += biases[i, :, None]
                out[i] = values
        return out.reshape(shape)

    def quantized():
        codes, scales, biases = read()
        half, make = 2 ** (bits - 1), _formats[bits]
        options: dict[str, Any] = {"block_size": group, "scale_dtype": dtype.name}
        options |= {"fit": "absmax"} if bits < 8 else {}
        levels = codes.astype(np.int16)
        # Int8 without offsets has no -128.
        if (
            np.array_equal(biases, -half * scales)
            and have_exact_products(scales)
            and (bits < 8 or levels.min(initial=1))
        ):
            return from_levels(levels - half, scales, make(**options), dtype)
        # The bias is the value of the code 0, and stays as it is.
        format = make(**options | {"affine": True, "unsigned": True})
        return from_levels(levels, scales, format, dtype, biases)

    kind = f"MLX, {_formats[bits].__name__} in groups of {group}", True
    return parts.entry(shape, dtype, decode, quantized, kind)
