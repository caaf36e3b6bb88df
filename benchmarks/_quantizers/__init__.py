"""Quantizers of other libraries. Each file defines a `quantizer` for one library.

The files are also imported where the libraries are not installed. Therefore functions
import them.
"""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


# Float32 matrices by their names in the checkpoint.
Weights = dict[str, np.ndarray]


class Model(NamedTuple):
    """The weights to quantize, and the batches to calibrate on."""

    weights: Weights
    checkpoint: pathlib.Path
    # Tokens and masks. The mask is False for padding.
    batches: list[tuple[np.ndarray, np.ndarray]]


# Returns the dequantized weights, and the bytes of their codes and scales.
Quantize = Callable[[Model], tuple[Weights, int]]

# PyTorch without the libraries for GPUs, if this index is reachable.
PYTORCH = (
    "--retries=0",
    "--extra-index-url=https://download.pytorch.org/whl/cpu",
    "torch==2.13.0+cpu",
    "numpy",
)
# The packages of an environment that several quantizers share.
TORCH = (*PYTORCH, "torchao", "bitsandbytes", "hqq")


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A library: the name of its environment, its packages, and its formats.

    `load` returns the version and the formats by name. `header` is included at the
    start of every C++ file that pip compiles. `models` are the kinds of models that
    the library or its file here supports: the sentence encoder of `accuracy.py`, and
    decoders, which are language models. `reads_checkpoint` states that it reads
    `Model.checkpoint`.
    """

    environment: str
    packages: tuple[str, ...]
    load: Callable[[], tuple[str, dict[str, Quantize]]]
    header: str = ""
    models: tuple[str, ...] = ("encoder", "decoder")
    reads_checkpoint: bool = False


def weight_by_weight(
    round_trip: Callable[[np.ndarray], tuple[np.ndarray, int]],
) -> Quantize:
    """Quantize each weight separately, without calibration."""

    def quantize(model: Model):
        results = {name: round_trip(w) for name, w in model.weights.items()}
        decoded = {name: new for name, (new, _) in results.items()}
        return decoded, sum(size for _, size in results.values())

    return quantize


def find(kind: str = "") -> dict[str, Quantizer]:
    """Return all quantizers, or those for a kind of models."""
    files = sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    modules = {f.stem: importlib.import_module(f"{__name__}.{f.stem}") for f in files}
    found = {name: module.quantizer for name, module in modules.items()}
    return {name: q for name, q in found.items() if not kind or kind in q.models}
