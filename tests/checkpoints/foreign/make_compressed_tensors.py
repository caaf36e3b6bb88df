"""Write `compressed_tensors.safetensors` with compressed-tensors, and its decoded
values.

    python tests/checkpoints/foreign/make_compressed_tensors.py FOLDER
"""

import pathlib
import sys

import torch
from compressed_tensors.compressors import (
    MXFP4PackedCompressor,
    NaiveQuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file


# Bits, columns, group (`None` for a whole row), whether symmetric, dtype.
LAYERS = {
    "zeros": (4, 96, 32, False, "bfloat16"),
    "symmetric": (4, 64, 32, True, "float16"),
    "rows": (4, 100, None, False, "float16"),
    "two_bits": (2, 64, 32, False, "bfloat16"),
    "eight_bits": (8, 64, 64, True, "bfloat16"),
}
# FP8 or int8, the strategy of scales, dtype.
BYTES = {
    "fp8_rows": ("float", "channel", "bfloat16"),
    "fp8_whole": ("float", "tensor", "float32"),
    "int8_rows": ("int", "channel", "bfloat16"),
}
# Packed without padding, so codes cross from one int32 to the next.
DENSE = {
    "one_bit": (1, 64, 32, True, "bfloat16"),
    "three_bits": (3, 72, 24, False, "bfloat16"),
    "five_bits": (5, 96, 32, True, "float16"),
    "six_bits": (6, 64, 64, False, "bfloat16"),
    "seven_bits": (7, 40, None, True, "bfloat16"),
}
# The group of 4-bit floats, the dtype of scales.
FLOATS = {"mxfp4": (32, "uint8"), "nvfp4": (16, "float8_e4m3fn")}
ROWS = 12  # 12 codes do not fill an int32.


def layer(bits: int, columns: int, group: int | None, symmetric: bool, dtype):
    groups = 1 if group is None else columns // group
    half = 2 ** (bits - 1)
    # Avoid the lowest 8-bit level, which Int8 lacks.
    levels = torch.randint(-half + (bits == 8), half, (ROWS, columns))
    scales = (torch.randint(1, 100, (ROWS, groups)) / 512).to(dtype)
    zeros = torch.randint(-half, half, (ROWS, groups))
    zeros = torch.zeros_like(zeros) if symmetric else zeros
    repeat = lambda x: x.repeat_interleave(columns // groups, 1)
    state = {
        # Quantizing these values gives the same levels.
        "weight": (levels - repeat(zeros)).float() * repeat(scales).float(),
        "weight_scale": scales,
        "weight_zero_point": zeros.to(torch.int8),
    }
    strategy = "channel" if group is None else "group"
    weights = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return packed_and_back(PackedQuantizationCompressor, state, scheme)


def layer_of_bytes(kind: str, strategy: str, dtype):
    """Make an FP8 or int8 layer, with scales per row or per tensor."""
    if kind == "float":
        levels = torch.randint(0, 127, (ROWS, 40), dtype=torch.uint8)
        levels = levels.view(torch.float8_e4m3fn).float()
        levels[:, ::2] *= -1
    else:
        levels = torch.randint(-127, 128, (ROWS, 40)).float()
    count = ROWS if strategy == "channel" else 1
    scales = (torch.randint(1, 100, (count, 1)) / 512).to(dtype)
    state = {"weight": levels * scales.float(), "weight_scale": scales}
    if strategy == "tensor":
        state["weight_scale"] = scales[0]
    weights = QuantizationArgs(num_bits=8, type=kind, strategy=strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return packed_and_back(NaiveQuantizationCompressor, state, scheme)


def layer_of_fp4(group: int, scale_dtype):
    """Make a layer of 4-bit floats. NVFP4 also has a scale of the whole tensor."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    levels = values[torch.randint(0, 15, (ROWS, 64))]
    levels[:, ::group] = 6
    state, strategy = {}, "group"
    if group == 16:
        scales = torch.randint(1, 127, (ROWS, 4), dtype=torch.uint8)
        scales = scales.view(scale_dtype).float()
        divisor = torch.tensor([1234.5])
        state, strategy = {"weight_global_scale": divisor}, "tensor_group"
        repeated = (scales / divisor).repeat_interleave(group, 1)
    else:
        scales = 2.0 ** torch.randint(-12, 3, (ROWS, 2))
        repeated = scales.repeat_interleave(group, 1)
    state |= {"weight": levels * repeated, "weight_scale": scales}
    weights = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy=strategy,
        group_size=group,
        scale_dtype=scale_dtype,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = NVFP4PackedCompressor if group == 16 else MXFP4PackedCompressor
    return packed_and_back(compressor, state, scheme)


def packed_and_back(compressor, state: dict, scheme: QuantizationScheme):
    packed = compressor.compress(state, scheme)
    return packed, compressor.decompress(packed, scheme)["weight"]


def write(folder: pathlib.Path) -> None:
    torch.manual_seed(0)
    found, expected = {}, {}
    makers = dict.fromkeys(LAYERS, layer) | dict.fromkeys(BYTES, layer_of_bytes)
    makers |= dict.fromkeys(DENSE, layer) | dict.fromkeys(FLOATS, layer_of_fp4)
    for name, (*options, dtype) in (LAYERS | BYTES | DENSE | FLOATS).items():
        packed, weight = makers[name](*options, getattr(torch, dtype))
        found |= {f"{name}.{key}": value.contiguous() for key, value in packed.items()}
        expected[f"{name}.weight"] = weight.contiguous()
    save_file(found, folder / "compressed_tensors.safetensors", {"format": "pt"})
    save_file(expected, folder / "compressed_tensors_expected.safetensors")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
