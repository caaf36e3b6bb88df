"""torchao: the int4 of `Int4WeightOnlyConfig`, HQQ, and the int8 of
`Int8WeightOnlyConfig`.

torchao has kernels for int4 and HQQ on GPUs only. Their values do not depend on the
kernels, so this file calls torchao's functions that choose scales and zero points and
that round.
"""

import functools as ft

from . import Quantize, Quantizer, TORCH, weight_by_weight


def load() -> tuple[str, dict[str, Quantize]]:
    import torch
    import torchao
    from torchao.quantization import (
        Int8WeightOnlyConfig,
        MappingType,
        quant_primitives as q,
        quantize_,
    )

    # With two threads on busy cores, HQQ took four times as long.
    torch.set_num_threads(1)

    def plain(w, bits: int, block: int):
        """Compute scales and zero points from the minimum and maximum of each block."""
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

    def round_trip(w, encode, bits: int, block: int):
        codes, scales, zeros = encode(torch.from_numpy(w), bits, block)
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

    def int8(w):
        layer = torch.nn.Linear(*w.shape[::-1], bias=False)
        layer.weight.data = torch.from_numpy(w)
        quantize_(layer, Int8WeightOnlyConfig())
        new = layer.weight.detach()
        decoded = new.dequantize().numpy()
        return decoded, new.qdata.nbytes + new.scale.nbytes

    variants = {
        f"int{bits}{name}, block size {block}": weight_by_weight(
            ft.partial(round_trip, encode=encode, bits=bits, block=block)
        )
        for name, encode in (("", plain), (" + HQQ", hqq))
        for bits, block in ((4, 128), (4, 64), (4, 32), (3, 64))
    }
    variants["int8, per row"] = weight_by_weight(int8)
    return f"torchao {torchao.__version__}", variants


quantizer = Quantizer("accuracy", TORCH, load)
