"""torchao: int4 as `Int4WeightOnlyConfig` has it, and HQQ.

That has kernels for GPUs only. What its codes stand for does not depend on these: here
are the functions by which it chooses scales and zeros, and rounds.
"""

import functools as ft

from . import each, Quantize, Quantizer, TORCH


def load() -> tuple[str, dict[str, Quantize]]:
    import torch
    import torchao
    from torchao.quantization import MappingType, quant_primitives as q

    # On busy cores two threads wait for each other: HQQ took four times as long.
    torch.set_num_threads(1)

    def plain(w, bits: int, block: int):
        """Scale and zero from the smallest and the largest value of a block."""
        blocks, levels = (1, block), (0, 2**bits - 1)
        scales, zeros = q._choose_qparams_affine_tinygemm(
            w,
            MappingType.ASYMMETRIC,
            blocks,
            torch.int32,
            *levels,
            scale_dtype=torch.bfloat16,
            zero_point_dtype=torch.bfloat16,
        )
        codes = q._quantize_affine_tinygemm(
            w, blocks, scales, zeros, torch.int32, *levels
        )
        return codes, scales, zeros

    def hqq(w, bits: int, block: int):
        codes, scales, zeros, _ = q._choose_qparams_and_quantize_affine_hqq(
            w, bits, block, compute_dtype=torch.bfloat16, device="cpu"
        )
        return codes.int(), scales, zeros

    def rounded(w, how, bits: int, block: int):
        codes, scales, zeros = how(torch.from_numpy(w), bits, block)
        scales, zeros = (part.reshape(len(w), -1) for part in (scales, zeros))
        decoded = q._dequantize_affine_tinygemm(
            codes,
            (1, block),
            scales.float(),
            zeros.float(),
            torch.int32,
            *(0, 2**bits - 1),
        )
        return decoded.numpy(), w.size * bits // 8 + scales.nbytes + zeros.nbytes

    variants = {
        f"int{bits}{name}, blocks of {block}": each(
            ft.partial(rounded, how=how, bits=bits, block=block)
        )
        for name, how in (("", plain), (" + HQQ", hqq))
        for bits, block in ((4, 128), (4, 64), (4, 32), (3, 64))
    }
    return f"torchao {torchao.__version__}", variants


quantizer = Quantizer("accuracy", TORCH, load)
