"""Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import pathlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from folder import read_json
from model import Decoder
from names import apart, path_of, tensor_names
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file


# The head and small weights get no adapter.
RULES = {"head.*": None, "*.router.*": None}
_PREFIX = "base_model.model."
_is_adapted = lambda x: isinstance(x, eqquant.arrays.LoraArray)


def add_adapters(
    model: Decoder, rank: int, *, alpha: float, dropout: float = 0.0, key
) -> Decoder:
    """Add an adapter beside every weight of the layers."""
    rules = {k: v for k, v in RULES.items() if _has(model, k)}
    return eqquant.lora_tree(
        model, rank, key=key, alpha=alpha, dropout=dropout, rules=rules
    )


def _has(model: Decoder, rule: str) -> bool:
    if rule.startswith("head"):
        return model.head is not None
    return model.config.experts > 0


def _sites(model: Decoder):
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_adapted)
    return [(path_of(path), leaf) for path, leaf in leaves if _is_adapted(leaf)]


def _names(kind: str, model: Decoder, path: str, part: str):
    """Return the names of `a` or `b` of an adapter, one for each layer of a stack."""

    def rename(name):
        if isinstance(name, list):
            return [rename(x) for x in name]
        return f"{_PREFIX}{name.removesuffix('.weight')}.lora_{part}.weight"

    return rename(tensor_names(kind, model.config)(path))


def save_adapters(folder: pathlib.Path, model: Decoder, kind: str) -> None:
    """Save the adapters of a model whose `model_type` is `kind`."""
    sites = _sites(model)
    if not sites:
        raise ValueError("save_adapters: the model has no adapters.")
    tensors = {}
    for path, q in sites:
        for part, array in (("A", q.a), ("B", q.b)):
            names = _names(kind, model, path, part)
            tensors.update(apart(names, np.asarray(array)))
    (rank,) = {q.rank for _, q in sites}
    (scale,) = {q.scale for _, q in sites}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({_module(name) for name in tensors}),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text)


def load_adapters(folder: pathlib.Path, model: Decoder, kind: str) -> Decoder:
    """Return the model with saved adapters. `kind` is its `model_type`."""
    config = _read_config(folder)
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{folder}/adapter_model.safetensors: {error}.") from None
    adapted = add_adapters(
        model, config["r"], alpha=config["lora_alpha"], key=jax.random.key(0)
    )
    used = set()

    def take(name, like):
        if isinstance(name, list):
            parts = zip(name, like, strict=True)
            return np.stack([take(one, part) for one, part in parts])
        if name not in tensors:
            raise ValueError(f"{folder} has no tensor {name!r}.")
        if tensors[name].shape != like.shape:
            raise ValueError(
                f"{folder}: {name!r} must have the shape {like.shape} for this model, "
                f"and has {tensors[name].shape}."
            )
        used.add(name)
        return tensors[name]

    def load(path, leaf):
        if not _is_adapted(leaf):
            return leaf
        names = [_names(kind, model, path_of(path), part) for part in "AB"]
        if _module(names[0]) not in config["target_modules"]:
            return leaf.base
        a, b = (
            jnp.asarray(take(name, np.asarray(part)), part.dtype)
            for name, part in zip(names, (leaf.a, leaf.b), strict=True)
        )
        return eqx.tree_at(lambda q: (q.a, q.b), leaf, (a, b))

    out = jax.tree_util.tree_map_with_path(load, adapted, is_leaf=_is_adapted)
    if left := sorted(tensors.keys() - used):
        raise ValueError(f"{folder}: this model has no place for {left[0]!r}.")
    return out


# Unsupported features of PEFT, by their entries in `adapter_config.json`.
_OTHERS = (
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_bias",
)


def _read_config(folder: pathlib.Path) -> dict:
    config = read_json(folder / "adapter_config.json")
    where = f"{folder}/adapter_config.json"
    for name in ("peft_type", "r", "lora_alpha", "target_modules"):
        if name not in config:
            raise ValueError(f"{where} has no {name}.")
    for name, expected in (("peft_type", "LORA"), ("bias", "none")):
        if config.get(name, expected) != expected:
            raise ValueError(
                f"{where}: {name}={config[name]!r} is not supported, only {expected!r}."
            )
    for name in _OTHERS:
        if config.get(name):
            raise ValueError(f"{where}: {name}={config[name]!r} is not supported.")
    if not isinstance(config["target_modules"], list):
        raise ValueError(f"{where}: target_modules must be a list of names.")
    return config


def _module(name: str | list) -> str:
    """Return `q_proj` for a name such as `....q_proj.lora_A.weight`."""
    return _module(name[0]) if isinstance(name, list) else name.split(".")[-3]
