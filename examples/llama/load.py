"""Load a model from a Hugging Face folder or a GGUF file.

Weights can be quantized one by one while they load, so that the float model need not
fit into memory.

    model = load_model("Llama-3.2-1B", "nf4")
    model = load_model("SmolLM2-135M-Instruct.Q4_1.gguf")
"""

import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
from folder import Folder
from gguf_file import GGUF
from joined import join, names_of_joined, to_floats
from mixed import is_mixed, Mixed
from model import Decoder, unstack
from names import Names, path_of


# The router is small, and its errors select wrong experts.
RULES = {"*.router.*": None}

Model = Folder | GGUF


def open_model(model: str | pathlib.Path | Model) -> Model:
    """Return the folder or the file of a model."""
    if isinstance(model, Model):
        return model
    path = pathlib.Path(model)
    return GGUF(path) if path.is_file() else Folder(path)


def load_model(
    model: str | pathlib.Path | Model,
    format: eqquant.formats.Format | str | None = None,
    *,
    rules: Mapping | None = None,
    dtype=jnp.float32,
    stacked: bool | None = None,
    joined: bool = False,
    decode: bool | Literal["all"] = False,
    abstract: bool = False,
    progress: bool | None = None,
) -> Decoder:
    """Load a model, with its weights in `format`.

    **Arguments:**

    - `model`: a folder, a GGUF file, or a result of `open_model`.
    - `format`, `rules`, `decode`, `abstract`, `progress`: as in
        [`eqquant.load_quantized`][].
    - `dtype`: of all other arrays and of activations.
    - `stacked`: stack the layers, so that only one layer is compiled. By default, they
        are stacked, with [`Mixed`][] for weights that the file stores in different
        formats. Only mixtures of experts cannot have these.
    - `joined`: join weights with the same input, as `join` does (joined.py), but
        without a copy if the headers of the files determine their formats.
    """
    source = open_model(model)
    config = source.config
    mixes = stacked is None and not can_stack(source, decode)

    def make():
        model = Decoder(config, dtype, key=jax.random.key(0))
        if stacked is False or (mixes and config.experts):
            return unstack(model)
        return with_mixed(model, source, decode) if mixes else model

    like = eqx.filter_eval_shape(make)
    names = names_of_mixed(source.names, like)

    def load(like, abstract):
        return eqquant.load_quantized(
            source.path,
            like,
            format,
            rules={**(rules or {}), **(RULES if config.experts else {})},
            names=names_of_joined(names, like),
            ignore=source.ignore,
            decode=decode,
            abstract=abstract,
            progress=progress,
        )

    if joined and (described := _described(load, like)) is not None:
        described = join(described)
        if abstract:
            return described
        like = to_floats(described)
    loaded = load(like, abstract)
    loaded = loaded if abstract else source.arrange(loaded)
    return join(loaded) if joined else loaded


def _described(load: Callable, like: Decoder) -> Decoder | None:
    """Return the formats of all weights, if the headers of files determine them. For a
    damaged file, loading it raises the error again."""
    try:
        return load(like, True)
    except ValueError:
        return None


def can_stack(source: Model, decode: bool | Literal["all"] | None = None) -> bool:
    """Return whether the arrays of all layers have the same formats. By default, only
    inexact ones are decoded, as `load_in` does without a name."""
    if decode is None:
        decode = bool(source.inexact)
    if decode == "all":
        return True
    formats: dict[str, set[str]] = {}
    for name, tensor in source.tensors.items():
        in_any_layer = re.sub(r"\.\d+\.", ".*.", name, count=1)
        formats.setdefault(in_any_layer, set()).add(_format_of(tensor, decode))
    return all(len(found) == 1 for found in formats.values())


def _format_of(tensor: Any, decode: bool) -> str:
    is_decoded = not tensor.is_quantized or (decode and not tensor.is_exact)
    return "float" if is_decoded else tensor.type


def with_mixed(model: Decoder, source: Model, decode: bool) -> Decoder:
    """Split stacks of linear layers that the file stores in different formats."""

    def split(path, linear):
        if not isinstance(linear, eqx.nn.Linear):
            return linear
        names = source.names(f"layers.{path_of(path)}.weight")
        formats = [_format_of(source.tensors[name], decode) for name in names]
        order = list(dict.fromkeys(formats))
        kinds = [order.index(format) for format in formats]
        return Mixed.split(linear, kinds) if len(order) > 1 else linear

    layers = jax.tree_util.tree_map_with_path(
        split, model.layers, is_leaf=lambda x: isinstance(x, eqx.nn.Linear)
    )
    return eqx.tree_at(lambda m: m.layers, model, layers)


def names_of_mixed(names: Names, model: Decoder) -> Names:
    """Extend the names of tensors to the stacks of each [`Mixed`][] of a model."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_mixed)
    kinds = {path_of(path): leaf.kinds for path, leaf in leaves if is_mixed(leaf)}

    def call(path: str) -> str | list:
        found = re.fullmatch(r"(.+)\.stacks\.(\d+)\.(.+)", path)
        if found is None:
            return names(path)
        linear, kind, field = found.groups()
        of_layers = zip(names(f"{linear}.{field}"), kinds[linear], strict=True)
        return [name for name, other in of_layers if other == int(kind)]

    return call


def load_in(
    model: Model,
    name: str | None,
    formats: Mapping[str, eqquant.formats.Format | str | None],
    **options,
) -> Decoder:
    """Load a model in `formats[name]`, and print a message if that rounds quantized
    weights again.

    Without a name, quantized weights of the file keep their format. Other weights get
    the format of `model.default`. With `abstract`, no message is printed.
    """
    is_shown = not options.get("abstract")
    if name is not None:
        if model.types and is_shown:
            print(
                f"(The weights in {', '.join(model.types)} are decoded, and stored in "
                f"{name}.)",
                file=sys.stderr,
            )
        decode = "all" if model.types else False
        return load_model(model, formats[name], decode=decode, **options)
    if model.inexact and is_shown:
        print(
            f"(No format stores {', '.join(model.inexact)} exactly: weights in these "
            f"types are quantized again, in {model.default}.)",
            file=sys.stderr,
        )
    format = model.default and formats[model.default]
    return load_model(model, format, decode=bool(model.inexact), **options)
