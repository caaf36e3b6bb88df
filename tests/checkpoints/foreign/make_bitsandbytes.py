"""Write `bitsandbytes_*.safetensors` from layers of bitsandbytes, and their decoded
values.

    python tests/checkpoints/foreign/make_bitsandbytes.py FOLDER
"""

import copy
import pathlib
import sys

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from safetensors.torch import save_file


# Rows, columns, block size, whether scales are quantized, dtype, kind. The first nested
# weight has two groups of scales, with 256 and 24 scales.
LAYERS = {
    "nf4": (24, 128, 64, False, "float32", "nf4"),
    "nf4_32": (4, 64, 32, False, "bfloat16", "nf4"),
    "nf4_4096": (1, 4096, 4096, False, "float32", "nf4"),
    "nf4_nested": (140, 128, 64, True, "float16", "nf4"),
    "nf4_nested_32": (5, 128, 32, True, "float32", "nf4"),
    "nf4_blocks_of_rows": (64, 64, 1024, False, "float32", "nf4"),
    "nf4_across_rows": (6, 96, 64, True, "float32", "nf4"),
    "nf4_partial": (5, 32, 64, False, "float32", "nf4"),
    "nf4_far_across_rows": (8, 68, 64, False, "float32", "nf4"),
    "fp4": (4, 128, 64, False, "float32", "fp4"),
}


def weights(rng: np.random.Generator, rows: int, columns: int) -> torch.Tensor:
    # Few bits, so that results depend neither on rounding nor on the order of sums.
    normal = np.round(rng.standard_normal((rows, columns)) * 64) / 64
    return torch.from_numpy(normal.astype(np.float32))


def layer_of_4_bits(w: torch.Tensor, block, nested, dtype, kind):
    rows, columns = w.shape
    dtype = getattr(torch, dtype)
    parameter = bitsandbytes.nn.Params4bit(
        w.to(dtype),
        requires_grad=False,
        compress_statistics=nested,
        blocksize=block,
        quant_type=kind,
    )
    layer = bitsandbytes.nn.Linear4bit(columns, rows, quant_type=kind)
    layer.weight = parameter
    layer.bias = torch.nn.Parameter(w[:, 0].to(dtype).clone())
    return layer.to("cpu")


def decode(weight) -> torch.Tensor:
    """Decode the weight as one row. If blocks cross rows, the CPU kernel of
    bitsandbytes 0.50 uses the scales of other blocks, and its result is far from the
    weight."""
    state = copy.copy(weight.quant_state)
    state.shape = torch.Size((1, state.shape.numel()))
    return dequantize_4bit(weight.data, state).contiguous()


def write(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    found, expected = {}, {}
    for name, (rows, columns, *options) in LAYERS.items():
        layer = layer_of_4_bits(weights(rng, rows, columns), *options)
        found |= {f"{name}.{k}": v for k, v in layer.state_dict().items()}
        expected[f"{name}.weight"] = decode(layer.weight).reshape(rows, columns)
        expected[f"{name}.bias"] = layer.bias.data
    save_file(found, folder / "bitsandbytes_4bit.safetensors", {"format": "pt"})

    w = weights(rng, 12, 64)
    layer = bitsandbytes.nn.Linear8bitLt(64, 12, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(
        w.half(), requires_grad=False, has_fp16_weights=False
    )
    layer.bias = torch.nn.Parameter(w[:, 0].half())
    layer = layer.to("cpu")
    found = {f"int8.{k}": v for k, v in layer.state_dict().items()}
    save_file(found, folder / "bitsandbytes_int8.safetensors", {"format": "pt"})
    weight, scb = found["int8.weight"], found["int8.SCB"]
    expected["int8.weight"] = int8_vectorwise_dequant(weight, scb)
    expected["int8.bias"] = found["int8.bias"]
    save_file(expected, folder / "bitsandbytes_expected.safetensors")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
