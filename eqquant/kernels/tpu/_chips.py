"""The best parameters per chip, from `benchmarks/static/tpu_roofline.py --sweep`."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from ..._jax import device_kind, warn
from ...formats import Format
from .._compute import TPUKernel
from ._tiles import bits_of


# The numbers that codes become: 8-bit numbers, or single bits (in `_bits.py`).
Kind = Literal["int8", "float8", "bits of float8", "bits of int4"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """The hardware of a TPU generation, and the parameters that are fastest on it.

    - `gather_axis`: the axis of the hardware's byte lookup: 0 for sublanes (fast), 1
        for lanes.
    - `memory`: bytes of vector memory that a kernel may use.
    - `macs`: bfloat16 multiply-adds of all matrix units per cycle.
    - `int8`: whether the matrix unit takes int8.
    - `float8`: the float8 dtype that the matrix unit takes, if any.
    - `cores`: cores that share a memory, and the steps of a grid.
    - `bfloat16`: whether the vector unit adds and multiplies bfloat16.
    - `steps`: by format, for the decode kernel: rows of the weight in a tile, and bytes
        of a row in a chunk. With blocks, a chunk has 128 bytes.
    - `transposed`: by format, for the decode kernel: the value of
        `Operands.transposed`.
    - `bits`: by format, the kind if codes without blocks are multiplied bit by bit.
    - `logic`: whether lookups are slow enough that logic decodes some codes instead.
    - `tile_m`, `tile_n`: for the general kernel: rows of the activation and columns of
        the result in a tile.
    - `options`: the choices of the user, which take precedence.
    """

    gather_axis: int
    memory: int
    macs: int = 4 * 128**2
    int8: bool = True
    float8: Any = None
    cores: int = 1
    bfloat16: bool = False
    steps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    transposed: dict[str, int] = dataclasses.field(default_factory=dict)
    bits: dict[str, Kind] = dataclasses.field(default_factory=dict)
    logic: bool = False
    tile_m: int = 2048
    tile_n: int = 512
    options: TPUKernel = dataclasses.field(default_factory=TPUKernel)

    def steps_of(self, format: Format) -> tuple[int, int]:
        """Return the entry of `steps`, by default for another format of that width."""
        return self.steps.get(format.name, self.steps[_similar[bits_of(format)]])

    def transposed_of(self, format: Format) -> int:
        """Return the entry of `transposed`, with the same default."""
        default = self.transposed.get(_similar[bits_of(format)], 0)
        return self.transposed.get(format.name, default)

    def bits_of(self, format: Format) -> Kind | None:
        return None if format.block_size else self.bits.get(format.name)


_similar = {8: "int8", 4: "nf4", 2: "ternary", 1: "binary"}


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
    transposed={"ternary": 2, "binary": 2},
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
    transposed={"int8": 1, "nf4": 1, "ternary": 1, "binary": 1},
    bits={},
    tile_m=1024,
)

# The keys are values of `jax.Device.device_kind`.
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
    """Return the chip of the mesh in context, or of the default device.

    Other platforms get the fourth generation, whose choices work on every chip.
    """
    kind = device_kind()
    if kind not in _chips and "TPU" in kind:
        warn(
            f"eqquant has no parameters for {kind!r}: kernels use those for "
            "'TPU v5 lite'.",
            UserWarning,
            once=True,
        )
    found = _chips.get(kind, _fifth_e if "TPU" in kind else _fourth)
    return dataclasses.replace(found, options=options or TPUKernel())
