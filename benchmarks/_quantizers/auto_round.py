"""AutoRound, which trains the rounding of each layer with signed gradients."""

import functools as ft
import importlib.metadata

from . import Model, PYTORCH, Quantize, Quantizer, Weights
from ._transformers import batches, placeholder_tokenizer


def load() -> tuple[str, dict[str, Quantize]]:
    import torch
    import transformers
    from auto_round import AutoRound

    # The number of steps, and the rate: the default, and `auto-round-light`.
    rates = {200: None, 50: 5e-3}

    def quantized(model: Model, bits: int, steps: int) -> tuple[Weights, int]:
        decoder = transformers.AutoModelForCausalLM.from_pretrained(
            model.checkpoint, dtype=torch.float32
        )
        rows = list(batches(model))
        AutoRound(
            decoder,
            tokenizer=placeholder_tokenizer(),
            scheme="W4A16",
            bits=bits,
            group_size=64,
            sym=True,
            iters=steps,
            lr=rates[steps],
            dataset=rows,
            nsamples=len(rows),
            seqlen=rows[0]["input_ids"].shape[1],
            batch_size=8,
            device_map="cpu",
            enable_torch_compile=False,
        ).quantize()
        modules, decoded, nbytes = dict(decoder.named_modules()), {}, 0
        for name in model.weights:
            module = modules[name.removesuffix(".weight")]
            decoded[name] = module.weight.detach().float().numpy()
            nbytes += bits * decoded[name].size // 8 + module.scale.nbytes
        return decoded, nbytes

    variants = {
        f"int{bits}, {steps} steps, block size 64": ft.partial(
            quantized, bits=bits, steps=steps
        )
        for bits in (4, 3)
        for steps in rates
    }
    return f"AutoRound {importlib.metadata.version('auto-round')}", variants


quantizer = Quantizer(
    "autoround",
    (*PYTORCH, "auto-round==0.16.1"),
    load,
    models=("decoder",),
    reads_checkpoint=True,
)
