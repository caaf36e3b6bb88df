"""Make the folders next to this file.

Each contains a tiny random model of an architecture that `examples/llama` supports,
and the logits that transformers computes for it.

    pip install torch transformers safetensors
    python tests/examples/data/make_llama.py

Weights are large enough to make attention sparse, and to make soft caps, windows and
scaled positions change the logits. They are exact in bfloat16. Logits are computed in
float32.
"""

import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file


HERE = pathlib.Path(__file__).parent / "llama"

COMMON = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
GEMMA = dict(query_pre_attn_scalar=24, tie_word_embeddings=True, sliding_window=6)
GEMMA3 = {
    "full_attention": {**LINEAR, "rope_theta": 100_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
}
EXPERTS = dict(num_experts_per_tok=2)

MODELS = {
    "llama2": ("Llama", dict(num_key_value_heads=4)),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama_linear": ("Llama", dict(rope_parameters=LINEAR, attention_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=6)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        dict(GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=5.0),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            GEMMA,
            rope_parameters=GEMMA3,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "mixtral": (
        "Mixtral",
        dict(EXPERTS, num_local_experts=3, sliding_window=None, intermediate_size=16),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(EXPERTS, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True),
    ),
}


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    is_gemma = "Gemma" in type(model).__name__
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = (0 if is_gemma else 1) + 0.2 * noise
        elif "embed" in name:
            value = 0.5 * noise
        else:
            value = noise * (0.5 if weight.ndim == 1 else 1.2 / weight.shape[-1] ** 0.5)
        weight.data = value.bfloat16().float()


@torch.no_grad()
def make(name: str, family: str, options: dict) -> None:
    text = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + text)(**{**COMMON, **options})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(model)
    model.tie_weights()
    tokens = torch.randint(0, 128, (2, 21), generator=torch.Generator().manual_seed(1))
    logits = model(tokens).logits
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    shards = "30KB" if name == "llama2" else "1GB"
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shards)
    (folder / "generation_config.json").unlink(missing_ok=True)
    reference = {"tokens": tokens.int(), "logits": logits.float()}
    save_file(reference, folder / "reference.safetensors")
    print(f"{name:14}", f"logits of {logits.std():.3f} on average")


def main() -> None:
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name, (family, options) in MODELS.items():
        make(name, family, options)


if __name__ == "__main__":
    main()
