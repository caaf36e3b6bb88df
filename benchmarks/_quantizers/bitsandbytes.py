"""bitsandbytes."""

import functools as ft

from . import Quantize, Quantizer, TORCH, weight_by_weight


def load() -> tuple[str, dict[str, Quantize]]:
    import bitsandbytes as bnb
    import torch

    def round_trip(w, kind: str, double: bool):
        codes, state = bnb.functional.quantize_4bit(
            torch.from_numpy(w),
            blocksize=64,
            quant_type=kind,
            compress_statistics=double,
        )
        nbytes = codes.nbytes + state.absmax.nbytes
        if double:  # 8-bit scales, and one float per 256 scales.
            nbytes += state.state2.absmax.nbytes + state.offset.nbytes
        return bnb.functional.dequantize_4bit(codes, state).numpy(), nbytes

    return f"bitsandbytes {bnb.__version__}", {
        "nf4": weight_by_weight(ft.partial(round_trip, kind="nf4", double=False)),
        "nf4, double quantization": weight_by_weight(
            ft.partial(round_trip, kind="nf4", double=True)
        ),
        "fp4": weight_by_weight(ft.partial(round_trip, kind="fp4", double=False)),
    }


quantizer = Quantizer("accuracy", TORCH, load)
