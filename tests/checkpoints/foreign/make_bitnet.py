"""Write `bitnet_*/`: files of transformers, and the weights with which its layers
multiply.

    python tests/checkpoints/foreign/make_bitnet.py FOLDER
"""

import json
import os
import pathlib
import sys


os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.integrations import bitnet


ROWS, COLUMNS = 16, 24
# Not a power of two, so that dividing by it rounds.
SCALE = 1.25


def layer_of(kind: str, packed: torch.Tensor) -> torch.nn.Module:
    if kind == "bitlinear":
        layer = bitnet.BitLinear(COLUMNS, ROWS, bias=False, dtype=torch.float32)
    else:
        layer = bitnet.AutoBitLinear(COLUMNS, ROWS, bias=False, dtype=torch.float32)
        # transformers unpacks the weights when it loads a model.
        packed = bitnet.unpack_weights(packed, dtype=torch.float32)
    state = {"weight": packed, "weight_scale": torch.tensor([SCALE])}
    layer.load_state_dict(state)
    return layer


def write(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    levels = torch.from_numpy(rng.integers(-1, 2, (ROWS, COLUMNS))).float()
    for kind in ("bitlinear", "autobitlinear"):
        place = folder / f"bitnet_{kind}"
        place.mkdir(exist_ok=True)
        packed = bitnet.pack_weights(levels.clone())
        tensors = {
            "layer.weight": packed,
            "layer.weight_scale": torch.tensor([SCALE], dtype=torch.bfloat16),
            "norm.weight": torch.ones(COLUMNS, dtype=torch.bfloat16),
        }
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        config = {
            "quant_method": "bitnet",
            "linear_class": kind,
            "quantization_mode": "offline",
        }
        text = json.dumps({"quantization_config": config}, indent=2)
        (place / "config.json").write_text(text + "\n")
        # int8 activations are exact for a row with a single entry, 1.
        with torch.no_grad():
            product = layer_of(kind, packed)(torch.eye(COLUMNS))
        save_file(
            {"layer.weight": product.T.contiguous()}, place / "expected.safetensors"
        )


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
