"""Ternary weights of BitNet, as Hugging Face packs them in safetensors.

`weight` is uint8, `(rows / 4, columns)`. The rows are cut in four runs, and bits `2 i`
of a byte hold run `i`, as the level plus one. `weight_scale` is one number, and
`config.json` says what is done with it: layers of the class `bitlinear` divide by it,
and those of `autobitlinear` multiply.
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
                f"{where} is packed in a way that eqquant does not know: uint8 of the "
                f"shape {stored.shape}, beside {name!r}, {scale.dtype} of the shape "
                f"{scale.shape}. Ternary weights of BitNet are matrices with one scale."
            )
        if divides is None:
            divides = _divides(source)
        entries[weight] = _entry(source, stored, scale, divides, where)
    return entries


def _divides(source: Source) -> bool:
    """Whether layers divide by their scale, which is for `config.json` to say."""
    says = "whether their scale divides or multiplies"
    config = PackingConfig(source, "ternary weights as BitNet does", says)
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
        found = runs.reshape(shape).astype(np.int8) - np.int8(1)
        if np.any(found > 1):
            raise ValueError(f"{where} has codes that are not ternary.")
        return found

    def scales() -> np.ndarray:
        one = source.read(scale.name).reshape(()).astype(np.float32)
        if divides:
            with np.errstate(divide="ignore"):
                one = np.float32(1) / one
        if not np.isfinite(one):
            raise ValueError(f"{where} has a scale that is 0 or not finite.")
        return np.full((shape[0], 1), one, np.float32)

    def quantized():
        return from_levels(levels(), scales(), Ternary(), scale.dtype)

    def decode() -> np.ndarray:
        return (levels() * scales()).astype(scale.dtype)

    how = decode, quantized, ("BitNet", True), (stored.name, scale.name)
    return Entry(where, shape, scale.dtype, *how)
