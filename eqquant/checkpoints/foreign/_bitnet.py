"""Ternary weights of BitNet, as Hugging Face packs them in safetensors.

`weight` is uint8 `(rows / 4, columns)`. The rows are cut into four runs. Bits `2 i` and
`2 i + 1` of a byte hold the level of run `i` plus one. `weight_scale` is one number.
Layers of the class `bitlinear` divide by it, and layers of `autobitlinear` multiply.
`config.json` names the class.
"""

import numpy as np

from ...formats import Ternary
from ..files import Source, Tensor
from ._config import PackingConfig
from ._entry import Entry, from_levels


SCALE = "_scale"
_scale_dtypes = ("float32", "float16", "bfloat16")


def bitnet_entries(source: Source) -> dict[str, Entry]:
    entries = {}
    divides = None
    for name, scale in source.tensors.items():
        weight = name.removesuffix(SCALE)
        stored = source.tensors.get(weight)
        if weight == name or stored is None or stored.dtype != np.uint8:
            continue
        if not weight.endswith("weight"):
            continue
        where = f"{source.path}: {weight!r}"
        if (
            scale.size != 1
            or scale.dtype.name not in _scale_dtypes
            or len(stored.shape) != 2
        ):
            raise ValueError(
                f"{where} is uint8{stored.shape} and {name!r} is "
                f"{scale.dtype}{scale.shape}. Ternary weights of BitNet must be uint8 "
                f"matrices with one scale in {', '.join(_scale_dtypes)}."
            )
        if divides is None:
            divides = _divides(source)
        entries[weight] = _entry(source, stored, scale, divides, where)
    return entries


def _divides(source: Source) -> bool:
    """Return whether layers divide by their scale, from `config.json`."""
    config = PackingConfig(
        source, "ternary weights of BitNet", "whether scales divide or multiply"
    )
    config.one_of("quant_method", ("bitnet",))
    kinds = "bitlinear", "autobitlinear"
    return config.one_of("linear_class", kinds, kinds[0]) == kinds[0]


def _entry(
    source: Source, stored: Tensor, scale: Tensor, divides: bool, where: str
) -> Entry:
    quarter, columns = stored.shape
    shape = (4 * quarter, columns)

    def levels() -> np.ndarray:
        packed = source.read(stored.name)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
        runs = (packed >> shifts) & np.uint8(3)
        unpacked = runs.reshape(shape).astype(np.int8) - np.int8(1)
        if np.any(unpacked > 1):
            raise ValueError(f"{where} has codes of 3; ternary codes are 0, 1 and 2.")
        return unpacked

    def scales() -> np.ndarray:
        factor = source.read(scale.name).reshape(()).astype(np.float32)
        if divides:
            with np.errstate(divide="ignore"):
                factor = np.float32(1) / factor
        if not np.isfinite(factor):
            raise ValueError(f"{where}: {scale.name!r} must be finite and not 0.")
        return np.full((shape[0], 1), factor, np.float32)

    def quantized():
        return from_levels(levels(), scales(), Ternary(), scale.dtype)

    def decode() -> np.ndarray:
        return (levels() * scales()).astype(scale.dtype)

    kind, names = ("BitNet", True), (stored.name, scale.name)
    return Entry(where, shape, scale.dtype, decode, quantized, kind, names)
