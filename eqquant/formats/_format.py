"""The abstract format: what every quantized array is made of."""

import abc
import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ._pack import group_multiple, planes_of


Float8: TypeAlias = Literal["e4m3fn", "e5m2"]
# Fields of `eqquant.kernels.Compute` that were fields of formats.
_compute_fields = {"precision", "activations", "tpu", "gpu"}
SCALE_DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """How floats become codes and scales: `float = level(code) * scale`.

    A format is frozen, hashable and equal by value. It is a static part of every
    quantized array, so JAX traces again if any of its fields changes. A subclass has
    `name`, `bits` and [`encode`][], and either a `codebook` or its own [`levels`][].

    **Arguments:**

    - `block_size`: how many consecutive values share one scale; `None` for one scale
        along the whole of the blocked axis (per channel).
    - `scale_dtype`: how scales are stored: bfloat16, float32 or float64.
    """

    block_size: int | None = None
    scale_dtype: Any = "float32"

    name: ClassVar[str]
    bits: ClassVar[int]
    # The value of each code, for formats that decode through a table.
    codebook: ClassVar[tuple[float, ...] | None] = None
    # Whether every level is an integer that int8 holds.
    integer_levels: ClassVar[bool] = False
    # Whether every level is -1, 0 or 1: an odd power of it is then the level itself.
    unit_levels: ClassVar[bool] = False
    # Which floats of 8 bits the codes are, times a scale, if they are such.
    float8: ClassVar[Float8 | None] = None
    # The largest magnitude of a level.
    largest_level: ClassVar[int | float] = 1
    # The largest positive level, where that is not the largest in magnitude.
    highest_level: ClassVar[int | float | None] = None
    # The code of zero (or what stands for it), which fills a partial last group.
    padding_code: ClassVar[int] = 0
    # For native encoders of float32: the code of a value is how many of these numbers
    # lie below `value / scale`, where the scale is the largest magnitude of the block,
    # or the best of some shares of it. Not inherited, as a subclass may encode in
    # another way.
    boundaries: ClassVar[tuple[float, ...] | None] = None
    shares: ClassVar[tuple[float, ...]] = ()
    # Codes without a level. A file that has one is damaged. Not inherited.
    unused_codes: ClassVar[tuple[int, ...]] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "boundaries" not in vars(cls):
            cls.boundaries = None
        is_derived = isinstance(getattr(cls, "unused_codes", None), property)
        if "unused_codes" not in vars(cls) and not is_derived:
            cls.unused_codes = ()
        # As these are claims about the levels, they go when the levels are others.
        if not vars(cls).keys().isdisjoint(("levels", "codebook")):
            claims = {"integer_levels": False, "unit_levels": False, "float8": None}
            for claim, nothing in claims.items():
                if claim not in vars(cls):
                    setattr(cls, claim, nothing)

    def __new__(cls, *args, **kwargs):
        """Reject keywords of [`eqquant.kernels.Compute`][], for every subclass."""
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
        return super().__new__(cls)

    def __post_init__(self):
        multiple = group_multiple(self.bits)
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
    def group(self) -> int:
        """How many consecutive codes are packed together: see `_pack.py`."""
        if planes_of(self.bits) == 1:
            return 1
        return self.block_size or 64

    @property
    def quantized_scales(self) -> bool:
        """Whether scales are `QuantizedScales` rather than an array."""
        return False

    @property
    def signed_scales(self) -> bool:
        """Whether a scale may be negative."""
        return False

    @property
    def has_offsets(self) -> bool:
        """Whether each block has an offset, which is added to its values."""
        return False

    @property
    def code_dtype(self):
        return jnp.int8 if self.bits == 8 else jnp.uint8

    def padded(self, size: int) -> int:
        """The stored length of a blocked axis of logical length `size`."""
        multiple = self.block_size or self.group
        return math.ceil(size / multiple) * multiple

    def num_blocks(self, size: int) -> int:
        """How many scales a blocked axis of logical length `size` has."""
        return math.ceil(size / self.block_size) if self.block_size else 1

    def no_scales(self, lead: Sequence[int], size: int) -> Any:
        """What `encode` returns beside codes, all of it zero, for such leading axes and
        such a blocked axis."""
        zero = jnp.zeros((*lead, self.num_blocks(size)), self.scale_dtype)
        return (zero, zero) if self.has_offsets else zero

    def scale_bytes(self, size: int) -> int:
        """How many bytes the scales of such a blocked axis take, and its offsets."""
        numbers = 2 if self.has_offsets else 1
        return self.num_blocks(size) * self.scale_dtype.itemsize * numbers

    @abc.abstractmethod
    def encode(
        self,
        blocks: Float[Array, "*lead blocks size"],
        absmax: Float[Array, "*lead blocks"],
        counts: Float[np.ndarray, " blocks"],
        limit: float,
    ) -> tuple[
        Shaped[Array, "*lead blocks size"],
        Any,
    ]:
        """Encode blocks of values. Returns codes (one for each value, not packed) and
        scales: floats, or [`eqquant.formats.QuantizedScales`][]; or a tuple of scales
        and offsets, if the format has these.

        **Arguments:**

        - `blocks`: float32 or float64. A partial last block is filled with zeros.
        - `absmax`: the largest magnitude of each block.
        - `counts`: how many values of each block are not such filling.
        - `limit`: the largest magnitude in the dtype of the array. Decoded values must
            not exceed it: see `bound_scales`.
        """

    def nearest(
        self,
        blocks: Float[Array, "*lead blocks size"],
        scales: Float[Array, "*lead blocks"],
    ) -> Shaped[Array, "*lead blocks size"]:
        """The code of the level nearest to each value, for given scales, such as
        learned ones."""
        del blocks, scales
        raise ValueError(f"{self!r} cannot be given scales: it chooses its own.")

    def levels(self, codes: Integer[Array, "*shape"], dtype) -> Shaped[Array, "*shape"]:
        """The value of each code, before scaling.

        This selects by the bits of the code instead of gathering from a table: that is
        exact, and it vectorises on every platform.
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
    """Scales as stored, in the range that decodes: the scale of a block that is not all
    zeros is not flushed to zero, and `largest * scale` does not exceed `limit`."""
    info = jnp.finfo(scale_dtype)
    top = largest_scale(scale_dtype, limit, largest)
    bounded = jnp.clip(
        scales,
        jnp.asarray(float(info.tiny), scales.dtype),
        jnp.asarray(top, scales.dtype),
    )
    return jnp.where(absmax > 0, bounded, 0).astype(scale_dtype)


def largest_scale(scale_dtype, limit: float, largest: int | float) -> float:
    """The largest scale for which `largest * scale` does not exceed `limit`."""
    top = np.asarray(
        min(float(jnp.finfo(scale_dtype).max), limit / largest), scale_dtype
    )
    if float(top) * largest > limit:
        top = np.nextafter(top, np.asarray(0, scale_dtype))
    return float(top)


def true_divide(x: Float[Array, "*shape"], by) -> Float[Array, "*shape"]:
    """`x / by`, correctly rounded.

    XLA turns a division by a constant, or by a broadcast array, into a product with the
    reciprocal, which is off in the last place: `x / x` is then not 1, and quantizing
    what was dequantized not the identity. The comparison is true of every number, but
    XLA cannot know, and so has to divide.
    """
    return x / jnp.where(x == x, jnp.asarray(by, x.dtype), 1)


def divide_blocks(
    blocks: Float[Array, "*lead size"], by: Float[Array, "*lead"]
) -> Float[Array, "*lead size"]:
    """Each block divided by its number; by 1 where that is zero."""
    by = jnp.where(by != 0, by, 1).astype(blocks.dtype)[..., None]
    # CUDA divides by a product with the reciprocal, which it computes for each value of
    # what `true_divide` hides from XLA, and otherwise once. The bits are the same.
    return lax.platform_dependent(
        blocks, by, cuda=lambda x, by: x / by, default=true_divide
    )


def max_blocks(blocks: Shaped[Array, "*lead size"]) -> Shaped[Array, "*lead"]:
    """`jnp.max(blocks, -1)`. Long blocks are reduced in 64 lanes first, and these then:
    XLA:CPU vectorises that."""
    *lead, size = blocks.shape
    if size > 64 and size % 64 == 0:
        blocks = jnp.max(blocks.reshape(*lead, size // 64, 64), -2)
    return jnp.max(blocks, -1)


def sum_blocks(blocks: Float[Array, "*lead size"]) -> Float[Array, "*lead"]:
    """`jnp.sum(blocks, -1)`; on a CPU by halves, which is the more accurate. Compilers
    sum in an order of their own, but do not change that of single additions: so a scale
    has the same bits on every CPU, and by native kernels too."""

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
    """`x**2`, rounded before anything is added to it, which XLA may or may not do."""
    return jnp.where(x == x, x * x, x)
