"""torchao."""

import functools as ft

from . import Quantizer, Round, TORCH


# Its kernel for CPUs takes as many outputs at once.
ROWS = 64


def load() -> tuple[str, dict[str, Round]]:
    import torch
    import torchao
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    def rounded(w, block: int, algorithm: str):
        rows, columns = w.shape
        filled = -(-rows // ROWS) * ROWS
        weight = torch.zeros(filled, columns)
        weight[:rows] = torch.from_numpy(w)
        layer = torch.nn.Linear(columns, filled, bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        config = Int4WeightOnlyConfig(
            group_size=block,
            int4_packing_format="opaque",
            int4_choose_qparams_algorithm=algorithm,
        )
        quantize_(layer, config)
        stored = layer.weight.qdata.nbytes + layer.weight.scale_and_zero.nbytes
        with torch.no_grad():
            decoded = layer(torch.eye(columns)).T[:rows]
        return decoded.float().contiguous().numpy(), stored * rows // filled

    return f"torchao {torchao.__version__}", {
        "int4": ft.partial(rounded, block=64, algorithm="tinygemm"),
        "int4, HQQ": ft.partial(rounded, block=64, algorithm="hqq"),
        "int4, HQQ, blocks of 128": ft.partial(rounded, block=128, algorithm="hqq"),
    }


quantizer = Quantizer("accuracy", TORCH, load)
