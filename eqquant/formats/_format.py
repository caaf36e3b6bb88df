"""The abstract base class of formats."""

import abc
import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ._history import LinearTable, states_of
from ._pack import (
    from_plane_order,
    group_multiple,
    pack,
    planes_of,
    to_plane_order,
    unpack_planes,
)


Float8: TypeAlias = Literal["e4m3fn", "e5m2"]
# Fields of `eqquant.kernels.Compute` that were fields of formats.
_compute_fields = {"precision", "activations", "tpu", "gpu"}
SCALE_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """A mapping of floats to codes and scales: `float = level(code) * scale`.

    A format is frozen, hashable and equal by value. It is a static field of every
    quantized array, so JAX traces again if any of its fields changes. A subclass
    defines `name`, `bits` and [`encode`][], and either a `codebook` or [`levels`][].

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        half = eqquant.formats.Codebook((-1.0, -0.5, 0.0, 0.5, 1.0))
        for format in (half, eqquant.NF4(block_size=32), eqquant.Int8()):
            assert isinstance(format, eqquant.formats.Format)
            assert eqquant.quantize(weight, format).format == format
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale; `None` for one
        scale along the whole blocked axis (per channel).
    - `scale_dtype`: the dtype of scales: float16, bfloat16, float32 or float64.
    """

    block_size: int | None = None
    scale_dtype: Any = "float32"

    _accepted_as: ClassVar[str] = "a format such as `eqquant.NF4()`"
    name: ClassVar[str]
    # The bits of a stored code. A fraction, for several codes that share their bits.
    bits: ClassVar[Any]
    # The number of codes before a code, in its block, on which its level depends. A
    # table of levels has no history.
    history: ClassVar[int] = 0
    # A table that gives the level of each state, if its index is linear.
    linear_table: ClassVar[LinearTable | None] = None
    # The value of each code, for formats that decode through a table.
    codebook: ClassVar[tuple[float, ...] | None] = None
    # True if every level is an integer that fits into int8.
    integer_levels: ClassVar[bool] = False
    # True if every level is -1, 0 or 1. An odd power of a level is then the level.
    unit_levels: ClassVar[bool] = False
    # The 8-bit float dtype of the codes, if they are floats.
    float8: ClassVar[Float8 | None] = None
    # The largest magnitude of a level.
    largest_level: ClassVar[int | float] = 1
    # The largest positive level, if it is not the largest in magnitude.
    highest_level: ClassVar[int | float | None] = None
    # The code of zero, or of the level nearest to it. It pads a partial last group.
    padding_code: ClassVar[int] = 0
    # For native float32 encoders: the code of a value is the number of boundaries below
    # `value / scale`. The scale is the largest magnitude of the block, or the best
    # candidate `share * largest magnitude`. These are not inherited, because a subclass
    # may encode differently.
    boundaries: ClassVar[tuple[float, ...] | None] = None
    shares: ClassVar[tuple[float, ...]] = ()
    # Codes without a level. A file that contains one is damaged. Not inherited.
    unused_codes: ClassVar[tuple[int, ...]] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "boundaries" not in vars(cls):
            cls.boundaries = None
        is_derived = isinstance(getattr(cls, "unused_codes", None), property)
        if "unused_codes" not in vars(cls) and not is_derived:
            cls.unused_codes = ()
        # Reset claims about the levels if a subclass defines other levels.
        if not vars(cls).keys().isdisjoint(("levels", "codebook")):
            claims = {"integer_levels": False, "unit_levels": False, "float8": None}
            claims["linear_table"] = None
            for claim, default in claims.items():
                if claim not in vars(cls):
                    setattr(cls, claim, default)

    def __new__(cls, *args, **kwargs):
        """Reject keywords of [`eqquant.kernels.Compute`][], and classes that are not
        complete, for every subclass."""
        del args
        moved = _compute_fields & kwargs.keys()
        moved -= {field.name for field in dataclasses.fields(cls)}
        if moved:
            name = min(moved)
            given = f"{name}={kwargs[name]!r}"
            raise TypeError(
                f"{cls.__name__}: {name} is not a field of a format; got {given}. Pass "
                f"`compute=eqquant.kernels.Compute({given})` to eqquant.quantize or "
                "eqquant.quantize_tree, or call `eqquant.with_compute(model, "
                f"{given})` for a quantized model."
            )
        if cls.__abstractmethods__:
            names = " and ".join(sorted(cls.__abstractmethods__))
            raise TypeError(
                f"{cls.__name__} is no complete format: it does not define {names}. A "
                "format defines `name`, `bits`, `codebook` or `levels`, and "
                "`encode(self, blocks, absmax, counts, limit)`, which returns a pair "
                "(codes, scales). See `eqquant.formats.Format`, and "
                "`eqquant.formats.Codebook` for other levels without a class."
            )
        return super().__new__(cls)

    def __post_init__(self):
        bits = getattr(self, "bits", None)
        if not isinstance(bits, int | Fraction) or bits <= 0:
            raise TypeError(
                f"{type(self).__name__}: bits must be a positive integer, got {bits!r}."
            )
        multiple = group_multiple(bits)
        block_size = self.block_size
        if block_size is not None:
            if isinstance(block_size, bool) or not isinstance(
                block_size, int | np.integer
            ):
                raise TypeError(
                    f"{type(self).__name__}: block_size must be a positive integer or "
                    f"None, got {block_size!r}."
                )
            if block_size < 1 or block_size % multiple:
                raise ValueError(
                    f"{type(self).__name__}: block_size must be a positive multiple of "
                    f"{multiple} (so many codes fill whole bytes), got {block_size}."
                )
            object.__setattr__(self, "block_size", int(block_size))
        try:
            scale_dtype = jnp.dtype(self.scale_dtype)
        except TypeError:
            scale_dtype = None
        if scale_dtype is None or scale_dtype.name not in SCALE_DTYPES:
            raise ValueError(
                f"{type(self).__name__}: scale_dtype must be one of {SCALE_DTYPES}, "
                f"got {self.scale_dtype!r}."
            )
        object.__setattr__(self, "scale_dtype", scale_dtype)

    def __repr__(self):
        shown = [
            f"{field.name}={_short(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.name == "block_size"
            or _short(getattr(self, field.name)) != _short(field.default)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def code_bits(self) -> int:
        """The bits of an unpacked code."""
        return math.ceil(self.bits)

    @property
    def used_codes(self) -> np.ndarray:
        """The codes that have a level, in ascending order."""
        codes = np.arange(2**self.code_bits, dtype=np.uint8).view(self.code_dtype)
        return np.setdiff1d(codes, np.array(self.unused_codes, self.code_dtype))

    @property
    def group(self) -> int:
        """The number of consecutive codes that `_pack.py` packs together."""
        if planes_of(self.bits) == 1:
            return 1
        return self.block_size or 64

    @property
    def plane_group(self) -> int:
        """The `group` for `to_plane_order`. Consecutive codes with a history share a
        byte."""
        return planes_of(self.bits) if self.history else self.group

    @property
    def quantized_scales(self) -> bool:
        """True if scales are `ShortScales` rather than an array."""
        return False

    @property
    def signed_scales(self) -> bool:
        """True if a scale may be negative."""
        return False

    @property
    def has_offsets(self) -> bool:
        """True if each block has an offset, which is added to its values."""
        return False

    @property
    def lowest_level(self) -> int | float:
        """The smallest level."""
        return -self.largest_level

    @property
    def centred(self) -> tuple["Format", int]:
        """A format with the same codes, and a number to add to its levels. Kernels
        multiply the levels of that format, which include negative numbers. Offsets
        provide the difference."""
        return self, 0

    @property
    def code_dtype(self):
        return jnp.int8 if self.bits == 8 else jnp.uint8

    def padded(self, size: int) -> int:
        """Return the stored length of a blocked axis of logical length `size`."""
        multiple = (self.block_size or self.group) * self.block_multiple
        return math.ceil(size / multiple) * multiple

    def num_blocks(self, size: int) -> int:
        """Return the number of scales along a blocked axis of logical length `size`."""
        return self.padded(size) // self.block_size if self.block_size else 1

    @property
    def block_multiple(self) -> int:
        """A divisor of the number of blocks in a row."""
        return 1

    @property
    def range_dtype(self) -> np.dtype:
        """The dtype that limits the magnitudes of weights."""
        return self.scale_dtype

    def no_scales(self, lead: Sequence[int], size: int) -> Any:
        """Return zeros with the structure of the scales and offsets of `encode`, for
        leading axes `lead` and a blocked axis of logical length `size`."""
        zero = jnp.zeros((*lead, self.num_blocks(size)), self.scale_dtype)
        return (zero, zero) if self.has_offsets else zero

    def scale_bytes(self, size: int) -> int:
        """Return the bytes of the scales and offsets along a blocked axis."""
        numbers = 2 if self.has_offsets else 1
        return self.num_blocks(size) * self.scale_dtype.itemsize * numbers

    @abc.abstractmethod
    def encode(
        self,
        blocks: Float[Array, "*lead blocks size"],
        absmax: Float[Array, "*lead blocks"],
        counts: Float[np.ndarray, " blocks"],
        limit: float,
    ) -> tuple[Shaped[Array, "*lead blocks size"], Any]:
        """Encode blocks of values.

        Return codes (one per value, not packed) and scales: floats, or
        [`eqquant.formats.QuantizedScales`][]. A format with offsets returns a tuple of
        scales and offsets as the second value.

        **Arguments:**

        - `blocks`: float32 or float64. Zeros pad a partial last block.
        - `absmax`: the largest magnitude of each block.
        - `counts`: the number of values in each block without padding.
        - `limit`: the largest magnitude in the dtype of the array. Decoded values must
            not exceed it; use `bound_scales`.
        """

    def choose_scales(
        self,
        blocks: Float[Array, "*lead blocks size"],
        absmax: Float[Array, "*lead blocks"],
        counts: Float[np.ndarray, " blocks"],
        limit: float,
    ) -> Any:
        """Return scales for blocks whose codes are chosen later, as by GPTQ. The
        arguments are those of [`encode`][]."""
        return self.encode(blocks, absmax, counts, limit)[1]

    def nearest(
        self,
        blocks: Float[Array, "*lead blocks size"],
        scales: Float[Array, "*lead blocks"],
    ) -> Shaped[Array, "*lead blocks size"]:
        """Return the code of the nearest level for each value, given the scales."""
        del blocks, scales
        raise ValueError(f"scales cannot be given to {self!r}: it computes its own.")

    def pack(self, codes: Integer[Array, "*groups group"]) -> Integer[Array, "..."]:
        """Pack groups of codes."""
        if self.history:
            codes = to_plane_order(codes, self.bits, self.plane_group)
        return pack(codes, self.bits)

    def states(
        self, packed: Integer[Array, "*lead packed"]
    ) -> Integer[Array, "*lead planes bytes"]:
        """Return the states of packed codes, in plane order. A state is a code above
        the `history` codes before it in its block, or zeros before the block."""
        codes = unpack_planes(packed, self.bits, self.group)
        if not self.history:
            return codes
        assert self.block_size is not None
        return states_of(codes, self.bits, self.history, self.block_size)

    def ordered_states(
        self, packed: Integer[Array, "*lead packed"]
    ) -> Integer[Array, "*lead size"]:
        """Return the states of packed codes, in the order of the values."""
        states = self.states(packed)
        *lead, planes, size = states.shape
        states = states.reshape(*lead, planes * size)
        return from_plane_order(states, self.bits, self.plane_group)

    def levels(self, codes: Integer[Array, "*shape"], dtype) -> Shaped[Array, "*shape"]:
        """Return the value of each code, before scaling; of each state, for a format
        with a `history`.

        Selection by the bits of the code is exact, and it vectorises on every platform,
        unlike a gather from a table.
        """
        assert self.codebook is not None
        table = [jnp.asarray(level, dtype) for level in self.codebook]
        for bit in range(self.bits):
            is_set = (codes & (1 << bit)) != 0
            table = [
                jnp.where(is_set, high, low)
                for low, high in zip(table[::2], table[1::2], strict=True)
            ]
        return table[0]


def _short(value) -> str:
    if isinstance(value, np.dtype):
        return repr(value.name)
    return repr(value)


def bound_scales(
    scales: Float[Array, "*lead blocks"],
    absmax: Float[Array, "*lead blocks"],
    scale_dtype,
    limit: float,
    *,
    largest: int | float = 1,
) -> Float[Array, "*lead blocks"]:
    """Convert scales to their stored dtype, within bounds.

    The scale of a nonzero block is not flushed to zero, and `largest * scale` does not
    exceed `limit`.
    """
    info = jnp.finfo(scale_dtype)
    top = largest_scale(scale_dtype, limit, largest)
    bounded = jnp.clip(
        scales,
        jnp.asarray(float(info.tiny), scales.dtype),
        jnp.asarray(top, scales.dtype),
    )
    return jnp.where(absmax > 0, bounded, 0).astype(scale_dtype)


def largest_scale(scale_dtype, limit: float, largest: int | float) -> float:
    """Return the largest scale for which `largest * scale` does not exceed `limit`."""
    top = np.asarray(
        min(float(jnp.finfo(scale_dtype).max), limit / largest), scale_dtype
    )
    if float(top) * largest > limit:
        top = np.nextafter(top, np.asarray(0, scale_dtype))
    return float(top)


def max_blocks(blocks: Shaped[Array, "*lead size"]) -> Shaped[Array, "*lead"]:
    """Return `jnp.max(blocks, -1)`. Long blocks are first reduced to 64 lanes, because
    XLA:CPU vectorises that."""
    *lead, size = blocks.shape
    if size > 64 and size % 64 == 0:
        blocks = jnp.max(blocks.reshape(*lead, size // 64, 64), -2)
    return jnp.max(blocks, -1)


def sum_blocks(blocks: Float[Array, "*lead size"]) -> Float[Array, "*lead"]:
    """Return `jnp.sum(blocks, -1)`, on CPUs as a tree of pairwise sums.

    A tree is more accurate. Compilers may reorder a sum, but not single additions. So a
    scale has the same bits on every CPU, and in the native kernels.
    """

    def by_halves(blocks):
        *lead, size = blocks.shape
        half = 1 << (size - 1).bit_length()
        blocks = jnp.pad(blocks, [(0, 0)] * len(lead) + [(0, half - size)])
        while half := half // 2:
            blocks = blocks[..., :half] + blocks[..., half:]
        return blocks[..., 0]

    by_compiler = ft.partial(jnp.sum, axis=-1)
    return lax.platform_dependent(blocks, cpu=by_halves, default=by_compiler)


def square(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `x**2`, rounded. Otherwise XLA may fuse a following addition."""
    return jnp.where(x == x, x * x, x)
