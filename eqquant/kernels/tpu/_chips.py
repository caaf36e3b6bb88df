"""What is best on which chip."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..._compat import device_kind
from ..._warn import warn


@dataclasses.dataclass(frozen=True)
class Chip:
    """The choices that depend on the generation."""

    # Along which axis the hardware looks bytes up: rows (fast), or lanes.
    gather_axis: int
    # How many rows of the weight a step decodes, by format.
    rows: dict[str, int]
    # How many bytes of a row are multiplied at once, without blocks.
    chunk: int = 256
    # Whether the matrix unit takes int8, and which float of 8 bits if it does not.
    int8: bool = True
    float8: Any = None
    # Of the activation in bfloat16, how many rows a tile has where there are many.
    tile_m: int = 1024
    # What a kernel may take of the vector memory, in bytes.
    memory: int = 2**25


_fourth = Chip(
    1,
    {"int8": 256, "nf4": 512, "ternary": 256, "binary": 1024},
    int8=False,
    tile_m=512,
    memory=2**24,
)
_fifth = Chip(1, {"int8": 256, "nf4": 512, "ternary": 256, "binary": 1024})
_sixth = Chip(0, {"int8": 256, "nf4": 256, "ternary": 1024, "binary": 1024})
_seventh = dataclasses.replace(_sixth, int8=False, float8=jnp.float8_e4m3fn)

# By what `jax.Device.device_kind` says.
_chips = {
    "TPU v4": _fourth,
    "TPU v5 lite": _fifth,
    "TPU v5e": _fifth,
    "TPU v5": _fifth,
    "TPU v5p": _fifth,
    "TPU v6 lite": _sixth,
    "TPU v6e": _sixth,
    "TPU7x": _seventh,
}


def chip() -> Chip:
    """Of the mesh in context, or of the default device. What the fourth generation does
    works on every one."""
    kind = device_kind()
    if kind not in _chips and "TPU" in kind:
        warn(
            f"eqquant has no table for {kind!r}; it uses that of 'TPU v5 lite'.",
            UserWarning,
            once=True,
        )
    return _chips.get(kind, _fifth if "TPU" in kind else _fourth)
