"""Ternary weights of BitNet, as Hugging Face packs them in safetensors.

`weight` is uint8, `(rows / 4, columns)`. The rows are cut in four runs, and bits `2 i`
of a byte hold run `i`, as the level plus one. `weight_scale` is one number, and
`config.json` says what is done with it: layers of the class `bitlinear` divide by it,
and those of `autobitlinear` multiply.
"""

import numpy as np

from ...formats import Ternary
from ..files import MAX_HEADER, parse_object, Source, Tensor
from ._entry import Entry, from_levels


SCALE = "_scale"
_scale_dtypes = ("float32", "float16", "bfloat16")


def bitnet_entries(source: Source) -> tuple[dict[str, Entry], set[str]]:
    """The weights by name, and the names of all the tensors that they are made of."""
    entries, used = {}, set()
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
        used |= {weight, name}
    return entries, used


def _divides(source: Source) -> bool:
    """Whether layers divide by their scale, which is for `config.json` to say."""
    path = source.path.parent / "config.json"
    if not path.is_file() or path.stat().st_size > MAX_HEADER:
        raise ValueError(
            f"{source.path}: has ternary weights as BitNet does, but there is no "
            f"{path.name} beside it, which says whether their scale divides or "
            "multiplies."
        )
    config = parse_object(path.read_bytes(), str(path)).get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != "bitnet":
        raise ValueError(f"{path}: quantization_config must be that of bitnet.")
    kind = config.get("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        raise ValueError(
            f"{path}: linear_class must be 'bitlinear' or 'autobitlinear', got "
            f"{kind!r}."
        )
    return kind == "bitlinear"


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

    return Entry(where, shape, scale.dtype, decode, quantized, ("BitNet", True))
