"""A model in a Hugging Face folder: `config.json`, safetensors, `tokenizer.json`."""

import dataclasses
import functools as ft
import json
import pathlib
from collections.abc import Sequence

import eqquant
import jax
import numpy as np
from architectures import config_of
from config import Config
from model import Decoder
from names import apart, Names, path_of, tensor_names
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from vocabulary import Vocabulary


class Folder:
    """The folder of a model. Files are read on demand.

    **Fields:**

    - `path`: the folder.
    - `kind`: the `model_type`.
    - `config`: the architecture.
    - `context_length`: the number of tokens that the model was made for, or `None`.
    - `names`: the names of tensors for the arrays of a model.
    - `ignore`: patterns for tensors that a model does not need.
    - `tensors`: a description of each tensor.
    - `types`: the types of quantized tensors.
    - `inexact`: the types that no format of eqquant stores exactly.
    - `default`: the name of the format for floats and for the types in `inexact`.
    """

    types: Sequence[str] = ()
    inexact: Sequence[str] = ()
    default: str | None = "nf4"

    def __init__(self, path: pathlib.Path):
        self.path = path

    @ft.cached_property
    def _values(self) -> dict:
        return read_json(self.path / "config.json")

    @ft.cached_property
    def config(self) -> Config:
        return config_of(self._values)

    @property
    def kind(self) -> str:
        return self._values["model_type"]

    @property
    def context_length(self) -> int | None:
        return self._values.get("max_position_embeddings")

    @ft.cached_property
    def tensors(self) -> dict:
        return eqquant.checkpoints.describe_checkpoint(self.path).tensors

    @property
    def names(self) -> Names:
        return tensor_names(self.kind, self.config)

    @property
    def ignore(self) -> list[str]:
        # Some checkpoints contain the head twice, or tensors that follow from
        # config.json.
        head = ["lm_head.weight"] if self.config.tied else []
        return ["*.rotary_emb.inv_freq", *head]

    def arrange(self, model: Decoder) -> Decoder:
        """Return the model for the weights of the file."""
        return model

    def vocabulary(self) -> Vocabulary:
        path = self.path / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{self.path} has no tokenizer.json.")
        options = self._read("tokenizer_config.json")

        def special(name: str) -> str:
            token = options.get(name) or ""
            return token["content"] if isinstance(token, dict) else token

        return Vocabulary(
            self.path,
            Tokenizer.from_file(str(path)),
            special("bos_token"),
            special("eos_token"),
            self._stop(),
            self._template(options.get("chat_template")),
        )

    def _read(self, name: str) -> dict:
        path = self.path / name
        return read_json(path) if path.exists() else {}

    def _stop(self) -> frozenset[int]:
        for name in ("generation_config.json", "config.json"):
            stop = self._read(name).get("eos_token_id")
            if stop is not None:
                return frozenset(stop if isinstance(stop, list) else [stop])
        return frozenset()

    def _template(self, source) -> str | None:
        path = self.path / "chat_template.jinja"
        if path.exists():
            return path.read_text("utf-8")
        if isinstance(source, list):  # Several named templates.
            return {entry["name"]: entry["template"] for entry in source}.get("default")
        return source


def write_model(folder: pathlib.Path, model: Decoder, length: int, **entries) -> None:
    """Write `config.json` and `model.safetensors` of a Llama, or of a Gemma 3, for at
    most `length` tokens. `entries` are added to `config.json`.

    Raises a `ValueError` for other architectures, and for scaled positions."""
    config = model.config
    values = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.size,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": "float32",
    }
    if config.post_norms:
        values |= _gemma3(config)
        # Its norms add 1 to their weight, and those of a GGUF file do not.
        config = dataclasses.replace(config, norm_offset=1.0)
    else:
        architecture = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        values |= architecture | {"hidden_act": "silu"}
    values |= entries
    if config_of(values) != config:
        raise ValueError(
            "model: only a Llama or a Gemma 3 without scaled positions can be written, "
            f"and the model has {config}."
        )
    names, tensors = tensor_names(values["model_type"], config), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        path, array = path_of(path), np.asarray(leaf)
        if config != model.config and path.removesuffix(".weight").endswith("norm"):
            array = array + (model.config.norm_offset - config.norm_offset)
        tensors.update(apart(names(path), array))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _gemma3(config: Config) -> dict:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round((config.attention_scale or 1) ** -2),
        "layer_types": [kinds[is_local] for is_local in config.local],
        "sliding_window": config.window,
        "rope_local_base_freq": config.local_rope_theta,
    }


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
