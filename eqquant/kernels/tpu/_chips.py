"""The best parameters per chip, from `benchmarks/static/tpu_roofline.py --sweep`."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from ..._jax import device_kind, warn
from ...formats import Format
from .._compute import TPUKernel
from ._tiles import bits_of


# What the matrix unit multiplies by: numbers of 8 bits; or single bits (`_bits.py`).
Kind = Literal["int8", "float8", "bits of float8", "bits of int4"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """What depends on the generation: the hardware, and the choices."""

    # Along which axis the hardware looks bytes up: rows (fast), or lanes.
    gather_axis: int
    # What a kernel may take of the vector memory, in bytes.
    memory: int
    # How many numbers in bfloat16 the matrix units multiply in a cycle.
    macs: int = 4 * 128**2
    # Whether the matrix unit takes int8, and which float of 8 bits if any.
    int8: bool = True
    float8: Any = None
    # Which share one memory, and the steps of a grid.
    cores: int = 1
    # Whether vectors of bfloat16 are added and multiplied as such.
    bfloat16: bool = False
    # For few rows, by format: how many rows of the weight a step decodes, and how many
    # bytes of each are multiplied at once (128 of them in blocks).
    steps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    # Whose codes are transposed first, so many rows as one (see `turn`): pairs only if
    # they have no blocks.
    turned: dict[str, int] = dataclasses.field(default_factory=dict)
    # Whose codes are multiplied bit by bit, if they have no blocks.
    bits: dict[str, Kind] = dataclasses.field(default_factory=dict)
    # Whether looking codes up is slow enough to do without for some.
    logic: bool = False
    # For many: rows of the activation and columns of the result of a tile.
    tile_m: int = 2048
    tile_n: int = 512
    # The choices of the user, which take precedence.
    options: TPUKernel = dataclasses.field(default_factory=TPUKernel)

    def steps_of(self, format: Format) -> tuple[int, int]:
        """As those of the format whose codes take as much room, if none are known."""
        return self.steps.get(format.name, self.steps[_like[bits_of(format)]])

    def turned_of(self, format: Format) -> int:
        """Likewise."""
        return self.turned.get(format.name, self.turned.get(_like[bits_of(format)], 0))

    def bits_of(self, format: Format) -> Kind | None:
        return None if format.block_size else self.bits.get(format.name)


_like = {8: "int8", 4: "nf4", 2: "ternary", 1: "binary"}


_fourth = Chip(
    gather_axis=1,
    memory=2**24,
    int8=False,
    cores=2,
    steps={
        "int8": (256, 256),
        "nf4": (512, 128),
        "ternary": (256, 256),
        "binary": (1024, 256),
    },
    tile_m=512,
)
_fifth_e = Chip(
    gather_axis=1,
    memory=100 * 2**20,
    float8=jnp.float8_e4m3b11fnuz,
    steps={
        "int8": (256, 256),
        "nf4": (512, 128),
        "ternary": (512, 512),
        "binary": (1024, 512),
    },
    bits={"binary": "bits of float8"},
    logic=True,
)
_fifth_p = dataclasses.replace(
    _fifth_e,
    cores=2,
    steps=_fifth_e.steps
    | {"nf4": (1024, 128), "ternary": (1024, 512), "binary": (1024, 512)},
)
_sixth = Chip(
    gather_axis=0,
    memory=100 * 2**20,
    macs=4 * 256**2,
    float8=jnp.float8_e4m3b11fnuz,
    bfloat16=True,
    steps={
        "int8": (256, 256),
        "nf4": (512, 128),
        "ternary": (1024, 128),
        "binary": (2048, 256),
    },
    turned={"ternary": 2, "binary": 2},
    bits={"binary": "bits of int4"},
    tile_n=1024,
)
_seventh = dataclasses.replace(
    _sixth,
    memory=56 * 2**20,
    int8=False,
    float8=jnp.float8_e4m3fn,
    steps={
        "int8": (256, 256),
        "nf4": (1024, 128),
        "ternary": (1024, 128),
        "binary": (2048, 128),
    },
    turned={"int8": 1, "nf4": 1, "ternary": 1, "binary": 1},
    bits={},
    tile_m=1024,
)

# By what `jax.Device.device_kind` says.
_chips = {
    "TPU v4": _fourth,
    "TPU v5 lite": _fifth_e,
    "TPU v5e": _fifth_e,
    "TPU v5": _fifth_p,
    "TPU v5p": _fifth_p,
    "TPU v6 lite": _sixth,
    "TPU v6e": _sixth,
    "TPU7x": _seventh,
}


def chip(options: TPUKernel | None = None) -> Chip:
    """Return the chip of the mesh in context, or of the default device. The settings of
    the fourth generation work on every chip."""
    kind = device_kind()
    if kind not in _chips and "TPU" in kind:
        warn(
            f"eqquant has no table for {kind!r}; it uses that of 'TPU v5 lite'.",
            UserWarning,
            once=True,
        )
    found = _chips.get(kind, _fifth_e if "TPU" in kind else _fourth)
    return dataclasses.replace(found, options=options or TPUKernel())
