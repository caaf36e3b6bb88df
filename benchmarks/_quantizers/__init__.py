"""Quantizers of other libraries: each has a file here that makes a `quantizer`.

That file is imported where the library is not installed, too, so it imports the library
in functions only.
"""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable

import numpy as np


# What the codes and scales of a matrix of float32 stand for, and how many bytes they
# take.
Round = Callable[[np.ndarray], tuple[np.ndarray, int]]

# One environment for those that need PyTorch, without what GPUs need.
TORCH = (
    "--extra-index-url=https://download.pytorch.org/whl/cpu",
    "torch==2.13.0+cpu",
    "torchao",
    "bitsandbytes",
    "numpy",
)


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A library: the environment that it is installed into, what to install, and what
    gives its version and its formats by their names."""

    environment: str
    packages: tuple[str, ...]
    load: Callable[[], tuple[str, dict[str, Round]]]


def find() -> dict[str, Quantizer]:
    files = sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    modules = {f.stem: importlib.import_module(f"{__name__}.{f.stem}") for f in files}
    return {name: module.quantizer for name, module in modules.items()}
