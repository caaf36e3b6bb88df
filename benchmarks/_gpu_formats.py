"""The formats of the benchmarks of GPUs: arguments of `eqquant.quantize` by name."""

from typing import Any

from eqquant.formats import Int5, Int6, Trellis


# These are timed by default.
DEFAULT = ["int8", "w8a8", "nf4", "ternary", "binary"]
FORMATS: dict[str, dict[str, Any]] = {
    **{name: {"format": name} for name in ("int8", "nf4", "ternary", "binary")},
    "w8a8": {"format": "int8", "activations": "int8"},
    "int4": {"format": "int4"},
    "int3": {"format": "int3"},
    "int5": {"format": Int5()},
    "int6": {"format": Int6()},
    **{f"trellis{bits}": {"format": Trellis(bits=bits)} for bits in (2, 3, 4)},
    # As in GGUF files.
    "q5_k": {"format": Int5(affine=True, double_quantization="k", unsigned=True)},
    "q6_k": {"format": Int6(block_size=16, double_quantization="k")},
}
