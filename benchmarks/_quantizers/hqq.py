"""HQQ, by its authors' library."""

import functools as ft
import importlib.metadata

from . import Quantize, Quantizer, TORCH, weight_by_weight


def load() -> tuple[str, dict[str, Quantize]]:
    import torch
    from hqq.core.quantize import Quantizer as Hqq

    torch.set_num_threads(1)

    def round_trip(w, bits: int):
        codes, meta = Hqq.quantize(
            torch.from_numpy(w),
            nbits=bits,
            group_size=64,
            axis=1,
            device="cpu",
        )
        # Scales and zero points become float16, as in HQQ's layers.
        codes, meta = Hqq.cpu(codes, meta)
        decoded = Hqq.dequantize(codes, meta | {"compute_dtype": torch.float32})
        # The library packs 10 codes of 3 bits into 32 bits. Count 3 bits.
        nbytes = w.size * bits // 8 + meta["scale"].nbytes + meta["zero"].nbytes
        return decoded.numpy(), nbytes

    variants = {
        f"int{bits}, block size 64": weight_by_weight(ft.partial(round_trip, bits=bits))
        for bits in (4, 3)
    }
    return f"hqq {importlib.metadata.version('hqq')}", variants


# On the sentence encoder, torchao represents HQQ.
quantizer = Quantizer("accuracy", TORCH, load, models=("decoder",))
