"""Code shared by the libraries for PyTorch."""

import importlib.metadata

from . import Products, Quantize, THREADS


def products(package: str, quantized: dict[str, Quantize]) -> Products:
    import torch

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)

    def dense(w):
        w = w.clone()  # Each weight of a ring has its own memory.
        return lambda x: torch.nn.functional.linear(x, w), w.nbytes

    version = f"{importlib.metadata.version(package)}, torch {torch.__version__}"
    return Products(
        version, dense, quantized, torch.from_numpy, lambda y: y.float().numpy()
    )
