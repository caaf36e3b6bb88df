"""bitsandbytes, for PyTorch."""

from . import Peer, Products
from ._torch import products


def load() -> Products:
    import bitsandbytes as bnb
    import torch

    def make(compute):
        def nf4(w):
            rows, columns = w.shape
            layer = bnb.nn.Linear4bit(
                columns, rows, bias=False, compute_dtype=compute, quant_type="nf4"
            )
            layer.weight = bnb.nn.Params4bit(
                w,
                requires_grad=False,
                quant_type="nf4",
                blocksize=64,
                compress_statistics=False,
            )
            layer = layer.to("cpu").eval()
            state = layer.weight.quant_state
            return layer, layer.weight.nbytes + state.absmax.nbytes

        return nf4

    return products(
        "bitsandbytes",
        {"nf4, float32": make(torch.float32), "nf4, bfloat16": make(torch.bfloat16)},
    )


peer = Peer("bitsandbytes", load, packages=("bitsandbytes", "torch", "numpy"))
