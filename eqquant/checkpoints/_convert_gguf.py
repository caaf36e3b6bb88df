"""Quantize a GGUF file to another one, and keep the metadata of GGUF files."""

import functools as ft
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from ..arrays import quantize
from ..trees import Choice
from .foreign import GGUFFile
from .writers import GGUFTensor, write_gguf_tensors


GGUF = ".gguf"


def as_described(choice: Choice, like: jax.ShapeDtypeStruct) -> Any:
    """Return an abstract quantized array."""
    return jax.eval_shape(lambda x: quantize(x, choice.format, axis=choice.axis), like)


def write_quantized(
    src: pathlib.Path,
    dst: pathlib.Path,
    choices: dict[str, Choice],
    make: Callable[[str], Any],
    caller: str,
) -> None:
    """Write a GGUF file in which `make` quantizes some tensors. Copy all others."""
    with GGUFFile(src) as source:
        tensors = []
        for name, stored in source.tensors.items():
            if name in choices:
                like = jax.ShapeDtypeStruct(stored.shape, "float32")
                described = as_described(choices[name], like)
                make_it = ft.partial(make, name)
                tensors.append(GGUFTensor.of(name, described, make_it, caller))
                continue
            if stored.shape and stored.shape[-1] % stored.type.block:
                raise ValueError(
                    f"{caller}: {name!r} has blocks of {stored.type.block} in "
                    f"{stored.type.name}, which cross its rows of {stored.shape[-1]}. "
                    "Add a rule that quantizes it."
                )
            tensors.append(GGUFTensor.copy(source, name))
        write_gguf_tensors(dst, tensors, source, {}, caller)


def write_metadata(src: pathlib.Path, dst: pathlib.Path, caller: str) -> None:
    """Write a GGUF file with the metadata and the tokenizer of another, and no
    tensors."""
    with GGUFFile(src) as source:
        write_gguf_tensors(dst, [], source, {}, caller)
