"""torchao: its HQQ, which `Int4WeightOnlyConfig` has kernels for on GPUs only."""

import functools as ft

from . import Quantizer, Round, TORCH


def load() -> tuple[str, dict[str, Round]]:
    import torch
    import torchao
    from torchao.quantization import quant_primitives

    hqq = quant_primitives._choose_qparams_and_quantize_affine_hqq

    def rounded(w, bits: int, block: int):
        codes, scales, zeros, _ = hqq(
            torch.from_numpy(w),
            nbits=bits,
            group_size=block,
            compute_dtype=torch.bfloat16,
            device="cpu",
            raw_output=True,
        )
        groups = codes.reshape(-1, block).float()
        numbers = [part.bfloat16().float().reshape(-1, 1) for part in (zeros, scales)]
        decoded = ((groups - numbers[0]) * numbers[1]).reshape(w.shape)
        # Scales and zeros in bfloat16.
        nbytes = w.size * bits // 8 + 2 * 2 * w.size // block
        return decoded.numpy(), nbytes

    return f"torchao {torchao.__version__}", {
        "int4, HQQ": ft.partial(rounded, bits=4, block=64),
        "int4, HQQ, blocks of 128": ft.partial(rounded, bits=4, block=128),
        "int3, HQQ": ft.partial(rounded, bits=3, block=64),
    }


quantizer = Quantizer("accuracy", TORCH, load)
