"""Load a model from a Hugging Face folder: `config.json`, safetensors,
`tokenizer.json`.

Weights can be quantized one by one while they load, so that the float model need not
fit into memory.

    model = load_model("Llama-3.2-1B", "nf4")
"""

import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from architectures import config_of
from config import Config
from model import Decoder, unstack


# The router is small, and its errors select wrong experts.
RULES = {"*.router.*": None}


def load_model(
    folder: str | pathlib.Path,
    format: eqquant.formats.Format | str | None = None,
    *,
    rules: Mapping | None = None,
    dtype=jnp.float32,
    stacked: bool = False,
    progress: bool | None = None,
) -> Decoder:
    """Load the model in `folder`, with its weights in `format`.

    **Arguments:**

    - `format`, `rules`, `progress`: as in [`eqquant.quantize_tree`][].
    - `dtype`: of all other arrays and of activations.
    - `stacked`: stack the layers, which is better for training. The default is better
        for generating text.
    """
    folder = pathlib.Path(folder)
    values = read_json(folder / "config.json")
    config = config_of(values)

    def make(key):
        model = Decoder(config, dtype, key=key)
        return model if stacked else unstack(model)

    return eqquant.load_quantized(
        folder,
        eqx.filter_eval_shape(make, jax.random.key(0)),
        format,
        rules={**(rules or {}), **(RULES if config.experts else {})},
        names=tensor_names(values["model_type"], config),
        # Some checkpoints contain the head twice, or tensors that follow from
        # config.json.
        ignore=["*.rotary_emb.inv_freq", *(["lm_head.weight"] if config.tied else [])],
        progress=progress,
    )


def read_json(path: pathlib.Path) -> dict:
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} is not the folder of a model: it has no {path.name}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, and holds {values!r:.60}.")
    return values


#
# Names
#


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


def tensor_names(kind: str, config: Config) -> Callable[[str], str | list]:
    """Return a function from paths in the model to names of tensors.

    A path is `layers.mlp.up.weight` or `layers.3.mlp.up.weight`, for example. The
    result is one name, or the names of the tensors to stack.
    """
    inside = {
        **_INSIDE,
        **(_DIFFERENT["post norms"] if config.post_norms else {}),
        **_DIFFERENT.get(kind, {}),
    }

    def names(path: str) -> str | list:
        owner, field = path.rsplit(".", 1)
        if owner in _OUTSIDE:
            return f"{_OUTSIDE[owner]}.{field}"
        match = re.fullmatch(r"layers\.(?:(\d+)\.)?(.+)", owner)
        if match is None or match[2] not in inside:
            raise ValueError(f"There is no tensor for {path}.")
        name = f"model.layers.{{layer}}.{inside[match[2]]}.{field}"

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
