"""GPTQModel: GPTQ with its default options."""

import functools as ft
import importlib.metadata
import os

from . import Model, Quantize, Quantizer, Weights
from ._transformers import batches, placeholder_tokenizer


def load() -> tuple[str, dict[str, Quantize]]:
    # Its default of one worker on two cores raises an error.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT

    def quantized(model: Model, bits: int) -> tuple[Weights, int]:
        placeholder_tokenizer().save_pretrained(model.checkpoint)
        config = QuantizeConfig(
            bits=bits,
            group_size=64,
            sym=True,
            # In the older format, modules have zero points that are off by one after
            # quantization. Both have the same codes and scales.
            format=FORMAT.GPTQ_V2,
            device="cpu",
            offload_to_disk=False,
        )
        new = GPTQModel.load(str(model.checkpoint), config, dtype=torch.float32)
        rows = list(batches(model))
        new.quantize(rows, batch_size=1, backend=BACKEND.GPTQ_TORCH)
        modules, decoded, nbytes = dict(new.model.named_modules()), {}, 0
        for name in model.weights:
            module = modules[name.removesuffix(".weight")]
            with torch.no_grad():
                weight = module.dequantize_weight().T.float()
            decoded[name] = weight.contiguous().numpy()
            # All zero points are equal, so only codes and scales of 16 bits count.
            nbytes += bits * weight.numel() // 8 + 2 * module.scales.numel()
        return decoded, nbytes

    variants = {
        f"int{bits}, block size 64": ft.partial(quantized, bits=bits) for bits in (4, 3)
    }
    return f"GPTQModel {importlib.metadata.version('gptqmodel')}", variants


quantizer = Quantizer(
    "gptqmodel",
    ("numpy", "gptqmodel==7.7.0"),
    load,
    models=("decoder",),
    reads_checkpoint=True,
)
