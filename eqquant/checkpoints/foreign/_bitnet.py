"""Ternary weights of BitNet, as Hugging Face packs them in safetensors.

`weight` is uint8 `(rows / 4, columns)`. The rows are cut into four runs. Bits `2 i` and
`2 i + 1` of a byte hold the level of run `i` plus one. `weight_scale` is one number.
Layers of the class `bitlinear` divide by it, and layers of `autobitlinear` multiply.
`config.json` names the class.
"""

import numpy as np

from ...formats import Ternary
from ..files import Source
from ._config import PackingConfig
from ._entry import Entry, from_levels
from ._parts import find_parts, Parts, SCALE_DTYPES


def bitnet_entries(source: Source) -> dict[str, Entry]:
    weights = [
        parts
        for parts in find_parts(source, "weight_scale", "BitNet")
        if "weight" in parts
        and parts.tensor("weight").dtype == np.uint8
        and "weight_scale_2" not in parts  # NVFP4 of ModelOpt.
    ]
    divides = _divides(source) if weights else False
    return {parts.weight: _entry(parts, divides) for parts in weights}


def _divides(source: Source) -> bool:
    """Return whether layers divide by their scale, from `config.json`."""
    setting = "whether scales divide or multiply"
    config = PackingConfig(source, "ternary weights of BitNet", setting)
    config.one_of("quant_method", ("bitnet",))
    kinds = "bitlinear", "autobitlinear"
    return config.one_of("linear_class", kinds, kinds[0]) == kinds[0]


def _entry(parts: Parts, divides: bool) -> Entry:
    quarter, columns = parts.look_up("weight", ("uint8",), (None, None)).shape
    shape, shapes = (4 * quarter, columns), ((), (1,), (1, 1))
    scale = parts.look_up("weight_scale", SCALE_DTYPES, *shapes)

    def levels() -> np.ndarray:
        packed = parts.read("weight")
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
        runs = (packed >> shifts) & np.uint8(3)
        unpacked = runs.reshape(shape).astype(np.int8) - np.int8(1)
        if np.any(unpacked > 1):
            parts.fail("has codes of 3; ternary codes are 0, 1 and 2.")
        return unpacked

    def scales() -> np.ndarray:
        factor = parts.read("weight_scale").reshape(()).astype(np.float32)
        if divides:
            with np.errstate(divide="ignore"):
                factor = np.float32(1) / factor
        if not np.isfinite(factor):
            parts.fail(f"has the scale {scale.name!r}, which must be finite and not 0.")
        return np.full((shape[0], 1), factor, np.float32)

    def quantized():
        return from_levels(levels(), scales(), Ternary(), scale.dtype)

    def decode() -> np.ndarray:
        return (levels() * scales()).astype(scale.dtype)

    kind = "BitNet", True
    return parts.entry(shape, scale.dtype, decode, quantized, kind)
