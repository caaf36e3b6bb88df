"""Write `gptq_*/`: tiny GPTQ and AWQ models of GPTQModel, their decoded weights, and
the logits of the models.

    python tests/checkpoints/foreign/make_gptq.py FOLDER [NAME ...]

Calibration in GPTQModel adds floats in an unspecified order, so codes differ between
machines.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile


# GPTQModel needs at least two samples to start.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
import transformers
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
from safetensors.torch import load_file, save_file
from tokenizers import models, Tokenizer


VOCABULARY = 64
GPTQ = {"bits": 4, "group_size": 32, "sym": False}
MODELS = {
    "gptq_zeros": GPTQ,
    "gptq_symmetric": {**GPTQ, "sym": True, "format": "gptq_v2"},
    "gptq_ordered": {**GPTQ, "desc_act": True},
    "gptq_awq": {**GPTQ, "method": "awq", "format": "gemm"},
}


def write_float_model(folder: pathlib.Path) -> None:
    # AWQ needs a multiple of 64 outputs.
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    # GPTQModel saves unquantized weights in bfloat16.
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", **special
    ).save_pretrained(folder)


def quantize(source: pathlib.Path, target: pathlib.Path, options: dict) -> None:
    model = GPTQModel.load(str(source), QuantizeConfig(**options))
    torch.manual_seed(1)
    rows = [torch.randint(3, VOCABULARY, (64,)).tolist() for _ in range(256)]
    model.quantize(
        [{"input_ids": row, "attention_mask": [1] * 64} for row in rows], batch_size=8
    )
    model.save(str(target))


def decode(tensors: dict, config: dict, dtype=None) -> dict[str, torch.Tensor]:
    """Dequantize weights with the code of GPTQModel, in the dtype of their scales or in
    `dtype`."""
    bits, group = config["bits"], config["group_size"]
    found = {}
    for name in [key for key in tensors if key.endswith(".qweight")]:
        prefix = name.removesuffix("qweight")
        parts = {
            key.removeprefix(prefix): tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix)
        }
        if config["quant_method"] == "awq":
            scales = parts["scales"].to(dtype)
            weight = dequantize_gemm(
                parts["qweight"], parts["qzeros"], scales, bits, group
            )
        else:
            packed, outputs = parts["qweight"].shape
            layer = TorchLinear(
                bits=bits,
                group_size=group,
                sym=config["sym"],
                desc_act=config["desc_act"],
                in_features=packed * 32 // bits,
                out_features=outputs,
            )
            layer.load_state_dict(parts)
            if config["checkpoint_format"] == "gptq":
                convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
            layer.scales = layer.scales.to(dtype)
            weight = layer.dequantize_weight()
        assert weight.dtype == (dtype or parts["scales"].dtype)
        found[f"{prefix}weight"] = weight.T.contiguous()
    return found


@torch.no_grad()
def expect(folder: pathlib.Path) -> None:
    """Write the expected weights and logits of a folder."""
    values = json.loads((folder / "config.json").read_text())
    quantization = values.pop("quantization_config")
    tensors = load_file(folder / "model.safetensors")
    weights = decode(tensors, quantization, torch.float32)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    model = model.float().eval()
    plain = {key: tensor for key, tensor in tensors.items() if "_proj" not in key}
    model.load_state_dict({**{k: v.float() for k, v in plain.items()}, **weights})
    tokens = torch.arange(3, 3 + 20)[None]
    expected = {"tokens": tokens, "logits": model(tokens).logits.contiguous()}
    weights = decode(tensors, quantization)
    expected |= {k: w for k, w in weights.items() if "self_attn" in k}
    save_file(expected, folder / "expected.safetensors")


def write(folder: pathlib.Path, *names: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source = pathlib.Path(temporary) / "source"
        write_float_model(source)
        for name in names or MODELS:
            saved = pathlib.Path(temporary) / name
            quantize(source, saved, MODELS[name])
            place = folder / name
            place.mkdir(exist_ok=True)
            shutil.copy(saved / "model.safetensors", place)
            config = json.loads((saved / "config.json").read_text())
            # Drop a local path and other irrelevant fields.
            del config["quantization_config"]["meta"]
            (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            expect(place)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *sys.argv[2:])
