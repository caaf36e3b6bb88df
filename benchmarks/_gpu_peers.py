"""Libraries to compare with on GPUs, all for PyTorch.

This module is also imported where the libraries are not installed. Therefore functions
import them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


# Maps a bfloat16 weight of shape (rows, columns) to a matmul and its bytes of codes and
# scales.
Make = Callable[[Any], tuple[Callable, int]]


@dataclasses.dataclass(frozen=True)
class GPUPeer:
    """A library, its packages, and a function that returns its formats by name."""

    name: str
    packages: tuple[str, ...]
    load: Callable[[], dict[str, Make]]


def dense(w):
    import torch

    return lambda x: torch.nn.functional.linear(x, w), w.nbytes


def _bitsandbytes() -> dict[str, Make]:
    import bitsandbytes as bnb
    import torch

    def nf4(w):
        rows, columns = w.shape
        layer = bnb.nn.Linear4bit(
            columns,
            rows,
            bias=False,
            compute_dtype=w.dtype,
            quant_type="nf4",
            compress_statistics=False,
        )
        layer.weight = bnb.nn.Params4bit(
            w.cpu(),
            requires_grad=False,
            quant_type="nf4",
            blocksize=64,
            compress_statistics=False,
        )
        layer = layer.to(w.device).eval()
        state = layer.weight.quant_state
        return layer, layer.weight.nbytes + state.absmax.nbytes

    def int8(w):
        rows, columns = w.shape
        layer = bnb.nn.Linear8bitLt(
            columns, rows, bias=False, has_fp16_weights=False, threshold=0.0
        )
        layer.weight = bnb.nn.Int8Params(
            w.half().cpu(), requires_grad=False, has_fp16_weights=False
        )
        layer = layer.to(w.device).eval()
        call = lambda x: layer(x.half())
        call(torch.zeros(1, columns, dtype=w.dtype, device=w.device))
        return call, rows * columns + 4 * rows

    return {"nf4": nf4, "w8a8": int8}


def _torchao() -> dict[str, Make]:
    import torch
    from torchao.quantization import (
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    linear = torch.compile(torch.nn.functional.linear)

    def make(config, bytes_each: float) -> Make:
        def quantize(w):
            rows, columns = w.shape
            layer = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False))
            layer[0].weight = torch.nn.Parameter(w.clone(), requires_grad=False)
            quantize_(layer, config())
            weight = layer[0].weight
            return lambda x: linear(x, weight), int(bytes_each * rows * columns)

        return quantize

    return {
        # A bfloat16 scale and a bfloat16 zero point per 128 weights.
        "int4": make(Int4WeightOnlyConfig, 0.5 + 4 / 128),
        "int8": make(Int8WeightOnlyConfig, 1),
        "w8a8": make(Int8DynamicActivationInt8WeightConfig, 1),
    }


peers = [
    GPUPeer("bitsandbytes", ("bitsandbytes", "torch", "numpy"), _bitsandbytes),
    GPUPeer("torchao", ("torchao", "torch", "numpy", "setuptools"), _torchao),
]
