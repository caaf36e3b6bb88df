"""Write the small models of `data/llama` as GGUF files, as llama.cpp converts them."""

import json
import pathlib
import sys

import equinox as eqx
import jax
import numpy as np


HERE = pathlib.Path(__file__).parent
DATA = HERE / "data" / "llama"
for folder in ("benchmarks", "examples/llama"):
    sys.path.insert(0, str(HERE.parents[1] / folder))

from _gguf import Tensor, write  # noqa: E402
from config import Llama3Scaling  # noqa: E402
from folder import Folder  # noqa: E402
from load import load_model  # noqa: E402
from names import apart, gguf_names, path_of  # noqa: E402


ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
# The values of a file by the entries of `config.json`.
KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def metadata_of(name):
    """Return the metadata of a model in `DATA` or in another folder, with a vocabulary
    of numbers."""
    values = json.loads((DATA / name / "config.json").read_text())
    kind = ARCHITECTURES[values["model_type"]]
    found = {new: values.get(old) for old, new in KEYS.items()}
    default = {"rope_theta": values.get("rope_theta"), "rope_type": "default"}
    rope = values.get("rope_parameters", default)
    if kind == "gemma3":
        found["attention.sliding_window_pattern"] = 2
        found["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    found["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] == "linear":
        found["rope.scaling.type"] = "linear"
        found["rope.scaling.factor"] = rope["factor"]
    tokens = [f"<{i}>" for i in range(values["vocab_size"])]
    return {
        "general.architecture": kind,
        **{f"{kind}.{k}": v for k, v in found.items() if v is not None},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
    }


def tensors_of(name):
    """Return the tensors of a model in the layout of llama.cpp."""
    folder = Folder(DATA / name)
    config = folder.config
    model = eqx.filter(load_model(folder, stacked=True, progress=False), eqx.is_array)
    is_llama = metadata_of(name)["general.architecture"] == "llama"
    tensors = {}
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        path = path_of(path)
        array = np.asarray(array, np.float32)
        if "norm" in path:
            array = array + np.float32(config.norm_offset)
        if is_llama and (".query." in path or ".key." in path):
            heads = config.heads if ".query." in path else config.kv_heads
            # Rotated pairs become neighbours.
            split = array.reshape(config.layers, heads, 2, config.head_size // 2, -1)
            array = split.swapaxes(2, 3).reshape(array.shape)
        tensors.update(apart(gguf_names(config)(path), array))
    if isinstance(config.rope_scaling, Llama3Scaling):
        plain = config.rope_theta ** -(
            np.arange(0, config.head_size, 2) / config.head_size
        )
        tensors["rope_freqs.weight"] = np.float32(plain / config.rope_scaling(plain))
    return tensors


def write_gguf(path, metadata, tensors):
    """Write float32 tensors."""
    described = [
        Tensor(name, array.shape, 0, array.nbytes, lambda array=array: array)
        for name, array in tensors.items()
    ]
    write(path, metadata, described)
    return path
