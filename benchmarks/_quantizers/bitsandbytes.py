"""bitsandbytes."""

import functools as ft

from . import each, Quantize, Quantizer, TORCH


def load() -> tuple[str, dict[str, Quantize]]:
    import bitsandbytes as bnb
    import torch

    def rounded(w, kind: str, twice: bool):
        codes, state = bnb.functional.quantize_4bit(
            torch.from_numpy(w),
            blocksize=64,
            quant_type=kind,
            compress_statistics=twice,
        )
        nbytes = codes.nbytes + state.absmax.nbytes
        if twice:  # Scales in 8 bits, and a float for each 256 of them.
            nbytes += state.state2.absmax.nbytes + state.offset.nbytes
        return bnb.functional.dequantize_4bit(codes, state).numpy(), nbytes

    return f"bitsandbytes {bnb.__version__}", {
        "nf4": each(ft.partial(rounded, kind="nf4", twice=False)),
        "nf4, double quantization": each(ft.partial(rounded, kind="nf4", twice=True)),
        "fp4": each(ft.partial(rounded, kind="fp4", twice=False)),
    }


quantizer = Quantizer("accuracy", TORCH, load)
