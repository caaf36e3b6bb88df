"""Functional quantization for JAX and Equinox.

The everyday names are here. Everything else is in a public module: `eqquant.formats`,
`eqquant.calibration`, `eqquant.checkpoints`, `eqquant.training`, `eqquant.sharding`,
`eqquant.kernels`, `eqquant.arrays`, `eqquant.trees` and `eqquant.debug`.
"""

import importlib as _importlib
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import (
    arrays as arrays,
    calibration as calibration,
    checkpoints as checkpoints,
    formats as formats,
    kernels as kernels,
    primitives as primitives,
    sharding as sharding,
    training as training,
    trees as trees,
)
from .arrays import (
    dequantize as dequantize,
    is_quantized as is_quantized,
    MaterialiseError as MaterialiseError,
    quantize as quantize,
    QuantizedArray as QuantizedArray,
)
from .calibration import allocate as allocate, calibrate as calibrate
from .checkpoints import load as load, load_quantized as load_quantized, save as save
from .dispatch import quaxify as quaxify, register as register
from .formats import (
    Binary as Binary,
    FP8 as FP8,
    Int2 as Int2,
    Int3 as Int3,
    Int4 as Int4,
    Int8 as Int8,
    MXFP4 as MXFP4,
    NF2 as NF2,
    NF3 as NF3,
    NF4 as NF4,
    NVFP4 as NVFP4,
    Ternary as Ternary,
)
from .sharding import shard_tree as shard_tree
from .training import (
    FakeQuantized as FakeQuantized,
    lora_tree as lora_tree,
    merge_lora as merge_lora,
    straight_through as straight_through,
)
from .trees import (
    cast_tree as cast_tree,
    dequantize_tree as dequantize_tree,
    quantize_tree as quantize_tree,
    report as report,
    trainable_mask as trainable_mask,
    with_compute as with_compute,
)


if _TYPE_CHECKING:
    from . import debug as debug

__version__ = "0.1.0"


def __getattr__(name: str) -> _ModuleType:
    """Import `debug` on first use, because few programs need it."""
    if name == "debug":
        return _importlib.import_module(".debug", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "debug"})


def _set_public_modules() -> None:
    """Set `__module__` of each public name to the module that users import it from.

    Tracebacks, `repr` of classes, and pickles then contain no private modules.
    """
    here = {name: x for name, x in globals().items() if not name.startswith("_")}
    modules = [x for x in here.values() if isinstance(x, _ModuleType)]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            getattr(module, name).__module__ = module.__name__
    for value in here.values():
        if not isinstance(value, _ModuleType):
            value.__module__ = __name__


_set_public_modules()
