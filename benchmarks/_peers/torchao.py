"""torchao, for PyTorch."""

from . import Peer, Products
from ._torch import products


def load() -> Products:
    import torch
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    def make(config):
        def quantize(w):
            rows, columns = w.shape
            layer = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False))
            layer[0].weight = torch.nn.Parameter(w, requires_grad=False)
            quantize_(layer, config())
            weight = layer[0].weight
            parts = (getattr(weight, name) for name in ("qdata", "scale"))
            return torch.compile(layer), sum(part.nbytes for part in parts)

        return quantize

    def int4(w):
        # The kernel of PyTorch that torchao's int4 weights use on CPUs: bfloat16
        # activations, and one scale and zero point per 64 weights.
        rows, columns = w.shape
        blocks = w.reshape(rows, -1, 64)
        low, high = blocks.amin(-1), blocks.amax(-1)
        scale = ((high - low) / 15).clamp(min=1e-9)
        codes = ((blocks - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            codes.reshape(rows, columns).int(), 1
        )
        # The second number of a pair is the value of code 8.
        pair = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1)
        pair = pair.contiguous().bfloat16()

        def product(x):
            return torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.bfloat16(), packed, 64, pair
            )

        return product, packed.nbytes + pair.nbytes

    return products(
        "torchao",
        {
            "int8": make(Int8WeightOnlyConfig),
            "int8, int8 activations": make(Int8DynamicActivationInt8WeightConfig),
            "int4 (torch), bfloat16": int4,
        },
    )


# torch.compile needs setuptools.
peer = Peer("torchao", load, packages=("torchao", "torch", "numpy", "setuptools"))
