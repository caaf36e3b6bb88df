"""llm-compressor: GPTQ with the same calibration sentences as eqquant."""

import functools as ft

from . import Model, PYTORCH, Quantize, Quantizer, Weights


def load() -> tuple[str, dict[str, Quantize]]:
    import importlib.metadata

    import torch
    from compressed_tensors.quantization import (
        fake_quantize,
        QuantizationArgs,
        QuantizationScheme,
    )
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import BertModel

    torch.set_num_threads(1)

    def quantized(
        model: Model, bits: int, block: int, symmetric: bool
    ) -> tuple[Weights, int]:
        bert = BertModel.from_pretrained(model.checkpoint, add_pooling_layer=False)

        def modifier(kind: type, target: str):
            weights = QuantizationArgs(
                num_bits=bits,
                strategy="group",
                group_size=block,
                symmetric=symmetric,
                observer="memoryless_minmax",
            )
            scheme = QuantizationScheme(targets=[target], weights=weights)
            ignored = ["embeddings.token_type_embeddings"]
            return kind(config_groups={"all": scheme}, ignore=ignored)

        # One sentence per batch, because padding would count in the statistics.
        sentences = [
            {
                "input_ids": torch.from_numpy(row[real])[None].long(),
                "attention_mask": torch.ones(1, int(real.sum()), dtype=torch.long),
            }
            for tokens, mask in model.batches
            for row, real in zip(tokens, mask, strict=True)
        ]
        oneshot(
            model=bert,
            dataset=torch.utils.data.DataLoader(sentences, batch_size=None),
            # llm-compressor has no GPTQ for embeddings.
            recipe=[
                modifier(GPTQModifier, "Linear"),
                modifier(QuantizationModifier, "Embedding"),
            ],
            pipeline="basic",
        )
        modules, decoded, nbytes = dict(bert.named_modules()), {}, 0
        for name in model.weights:
            module = modules[name.removesuffix(".weight")]
            args = module.quantization_scheme.weights
            zeros = getattr(module, "weight_zero_point", None)
            with torch.no_grad():
                new = fake_quantize(module.weight, module.weight_scale, zeros, args)
            decoded[name] = new.float().numpy()
            # Files store 16-bit scales, and zero points with the width of a code.
            block_bits = 16 + (0 if symmetric else bits)
            blocks = module.weight_scale.numel()
            nbytes += (bits * new.numel() + block_bits * blocks) // 8
        return decoded, nbytes

    variants = {
        f"int{bits}, GPTQ, {kind}, block size {block}": ft.partial(
            quantized, bits=bits, block=block, symmetric=kind == "symmetric"
        )
        for bits, kind, block in (
            (4, "symmetric", 128),
            (4, "asymmetric", 128),
            (4, "asymmetric", 32),
        )
    }
    return f"llmcompressor {importlib.metadata.version('llmcompressor')}", variants


quantizer = Quantizer(
    "llm-compressor",
    (*PYTORCH, "llmcompressor"),
    load,
    models=("encoder",),
    reads_checkpoint=True,
)
