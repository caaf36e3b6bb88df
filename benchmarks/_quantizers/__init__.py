"""Quantizers of other libraries: each has a file here that makes a `quantizer`.

That file is imported where the library is not installed, too, so it imports the library
in functions only.
"""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


# Matrices of float32, by their names in the checkpoint.
Weights = dict[str, np.ndarray]


class Model(NamedTuple):
    """What there is to quantize, and to calibrate on."""

    weights: Weights
    checkpoint: pathlib.Path
    # Tokens, and which of them are not padding.
    batches: list[tuple[np.ndarray, np.ndarray]]


# What the weights become, and how many bytes their codes and scales take.
Quantize = Callable[[Model], tuple[Weights, int]]

# PyTorch without what GPUs need. Without that index pip may have it elsewhere.
PYTORCH = (
    "--retries=0",
    "--extra-index-url=https://download.pytorch.org/whl/cpu",
    "torch==2.13.0+cpu",
    "numpy",
)
# One environment for those that need nothing else.
TORCH = (*PYTORCH, "torchao", "bitsandbytes")


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A library: the environment that it is installed into, what to install, what gives
    its version and its formats by their names, and what to put before every C++ file
    that is compiled."""

    environment: str
    packages: tuple[str, ...]
    load: Callable[[], tuple[str, dict[str, Quantize]]]
    header: str = ""


def each(rounded: Callable[[np.ndarray], tuple[np.ndarray, int]]) -> Quantize:
    """Weight by weight, without data."""

    def of(model: Model):
        results = {name: rounded(w) for name, w in model.weights.items()}
        decoded = {name: new for name, (new, _) in results.items()}
        return decoded, sum(size for _, size in results.values())

    return of


def find() -> dict[str, Quantizer]:
    files = sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    modules = {f.stem: importlib.import_module(f"{__name__}.{f.stem}") for f in files}
    return {name: module.quantizer for name, module in modules.items()}
