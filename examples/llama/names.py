"""Names of tensors in files, by the paths of arrays in the model."""

import re
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from config import Config


_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INSIDE = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.mlp.gate": "mlp.experts.{expert}.gate_proj",
    "mlp.mlp.up": "mlp.experts.{expert}.up_proj",
    "mlp.mlp.down": "mlp.experts.{expert}.down_proj",
}
_DIFFERENT = {
    "post norms": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "mixtral": {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.mlp.gate": "block_sparse_moe.experts.{expert}.w1",
        "mlp.mlp.up": "block_sparse_moe.experts.{expert}.w3",
        "mlp.mlp.down": "block_sparse_moe.experts.{expert}.w2",
    },
}
# In GGUF files, one tensor holds all experts of a layer.
_GGUF_OUTSIDE = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
_GGUF_INSIDE = {
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.mlp.gate": "ffn_gate_exps",
    "mlp.mlp.up": "ffn_up_exps",
    "mlp.mlp.down": "ffn_down_exps",
}


# The names of tensors for the path of an array: one name, or a list for a stack.
Names = Callable[[str], str | list]


def tensor_names(kind: str, config: Config) -> Names:
    """Return a function from paths in the model to names in Hugging Face files.

    A path is `layers.mlp.up.weight` or `layers.3.mlp.up.weight`, for example. `kind` is
    the `model_type`.
    """
    inside = {
        **_INSIDE,
        **(_DIFFERENT["post norms"] if config.post_norms else {}),
        **_DIFFERENT.get(kind, {}),
    }
    return _names(_OUTSIDE, inside, "model.layers", config)


def gguf_names(config: Config) -> Names:
    """Return a function from paths in the model to names in GGUF files."""
    return _names(_GGUF_OUTSIDE, _GGUF_INSIDE, "blk", config)


def _names(outside: Mapping, inside: Mapping, layers: str, config: Config) -> Names:
    def names(path: str) -> str | list:
        owner, field = path.rsplit(".", 1)
        if owner in outside:
            return f"{outside[owner]}.{field}"
        match = re.fullmatch(r"layers\.(?:(\d+)\.)?(.+)", owner)
        if match is None or match[2] not in inside:
            raise ValueError(f"There is no tensor for {path}.")
        name = f"{layers}.{{layer}}.{inside[match[2]]}.{field}"

        def of_layer(layer):
            if "{expert}" not in name:
                return name.format(layer=layer)
            experts = range(config.experts)
            return [name.format(layer=layer, expert=expert) for expert in experts]

        if match[1] is not None:
            return of_layer(match[1])
        return [of_layer(layer) for layer in range(config.layers)]

    return names


def apart(name: str | list, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Split an array, which may be a stack, into named arrays. The inverse of
    loading."""
    if isinstance(name, str):
        yield name, np.ascontiguousarray(array)
    else:
        for one, part in zip(name, array, strict=True):
            yield from apart(one, part)


def path_of(path: tuple) -> str:
    """Return the path of an array in the model, in the form that `tensor_names`
    expects."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
