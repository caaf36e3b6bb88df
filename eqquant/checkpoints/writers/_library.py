"""How a library stores a quantized weight, and the check that it stores it exactly."""

import abc
import dataclasses
from typing import Any, ClassVar, NoReturn

import jax.numpy as jnp
import numpy as np

from ...arrays import QuantizedArray
from ...formats import Float8Scales, float_scales, PowerOfTwoScales, unpack
from ..files import MemorySource
from ..foreign import safetensors_entries


class NotHeld(ValueError):
    """A library cannot store an array exactly. The message has the reason and the way
    out, and follows the name of the array."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight as a library stores it.

    **Fields:**

    - `tensors`: the tensors by their names in the file.
    - `layout`: the layout in words, such as `"int4 by groups of 128"`.
    - `settings`: the values for the configuration of the library: `None`, numbers,
        strings, or tuples of these.
    - `is_exact`: whether the values are those of the source.
    """

    tensors: dict[str, np.ndarray]
    layout: str
    settings: Any = None
    is_exact: bool = True


class Library(abc.ABC):
    """A library that reads checkpoints: its name, its tensors and its configuration."""

    name: ClassVar[str]

    @abc.abstractmethod
    def pack(self, name: str, q: QuantizedArray) -> Packed:
        """Return the tensors of a weight, or raise [`NotHeld`][]."""

    def config(self, packed: dict[str, Any], plain: list[str]) -> dict[str, Any]:
        """Return the entries of `config.json`, for the `settings` of each weight and
        the names of the matrices that are not quantized. Raise `ValueError` if one file
        cannot contain all of them."""
        del packed, plain
        return {}

    def packed(self, name: str, q: QuantizedArray) -> Packed:
        """Return the tensors of a weight. Read them back, and raise [`NotHeld`][] if
        their values differ from the values of the weight."""
        q.check_whole()
        packed = self.pack(name, q)
        config = self.config({name: packed.settings}, [])
        entry = safetensors_entries(MemorySource(packed.tensors, config))[name]
        if different := _largest_change(entry.decode(), q):
            raise NotHeld(
                f"would change by up to {different:.3g} as {packed.layout} of "
                f"{self.name}, which rounds products of scales and codes. Quantize it "
                "with scale_dtype='bfloat16'."
            )
        return packed


# The number of values that a check decodes at once.
_at_once = 2**18


def _largest_change(found: np.ndarray, q: QuantizedArray) -> float:
    """Return the largest difference between values and an array, decoded in float32 and
    cast to their dtype, or 0 if all are equal."""
    parts: Any = [(found, q)]
    if q.axes == (-1,) and q.ndim == 2:
        step = max(1, _at_once // q.shape[1])
        starts = range(0, q.shape[0], step)
        parts = ((found[i : i + step], q[i : i + step]) for i in starts)
    change = 0.0
    for some, part in parts:
        expected = np.asarray(part.with_dtype(jnp.float32).dequantize())
        with np.errstate(over="ignore"):
            expected = expected.astype(found.dtype).astype(np.float32)
        some = some.astype(np.float32)
        if not np.array_equal(some, expected, equal_nan=True):
            difference = np.abs(some.astype(np.float64) - expected).max()
            change = float(np.maximum(change, difference))
    return change


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The parts of a quantized matrix with one row per output, in NumPy.

    **Fields:**

    - `codes`: `(rows, columns)`, from 0 up for packed formats, as stored for others.
    - `scales`: `(rows, blocks)`, float32.
    - `offsets`: like `scales`, or `None`.
    - `block`: the number of columns per scale.
    - `is_whole`: whether a row has one scale.
    """

    q: QuantizedArray
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    block: int

    @property
    def is_whole(self) -> bool:
        return self.block == self.codes.shape[1]

    def scales_in(self, *dtypes: Any) -> np.ndarray:
        """Return the scales in the first dtype that represents them."""
        for dtype in dtypes:
            with np.errstate(over="ignore"):
                scales = self.scales.astype(dtype)
            if np.array_equal(scales.astype(np.float32), self.scales, equal_nan=True):
                return scales
        names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise NotHeld(
            f"has scales that {names} cannot represent. Quantize it with "
            "scale_dtype='bfloat16'."
        )

    def zero_points(self, levels: int) -> np.ndarray | None:
        """Return the code of zero for each block, from 0 to `levels - 1`; `None`
        without offsets."""
        if self.offsets is None:
            return None
        middle = -float(self.q.format.lowest_level)
        with np.errstate(divide="ignore", invalid="ignore"):
            zeros = middle - self.offsets.astype(np.float64) / self.scales
        zeros = np.where(self.scales == 0, middle, zeros)
        rounded = np.round(zeros)
        is_held = (rounded >= 0) & (rounded < levels)
        is_held &= (middle - rounded) * self.scales.astype(np.float64) == self.offsets
        if not np.all(is_held):
            raise NotHeld(
                "has offsets that are not whole multiples of their scales, which zero "
                "points are. Quantize it with affine=False, or with "
                "eqquant.checkpoints.quantize_with_zero_points."
            )
        return rounded.astype(np.uint8)


def as_matrix(q: QuantizedArray, library: str) -> Matrix:
    """Unpack a quantized matrix whose blocks run along rows, or raise [`NotHeld`][]."""
    if q.ndim != 2 or not q.size:
        raise NotHeld(
            f"has the shape {q.shape}; {library} stores matrices. Return a list of "
            "names for a stack from `names`."
        )
    rows, columns = q.shape
    format = q.format
    is_flat = q.axes == (-2, -1)
    if not is_flat and q.axes != (-1,):
        raise NotHeld(
            f"has blocks along the axes {q.axes}; {library} has blocks along the last "
            "axis. Write its transpose, or quantize it again with axis=-1."
        )
    block = format.block_size or columns
    if columns % block:
        raise NotHeld(
            f"has rows of {columns}, which blocks of {block} do not divide. Quantize "
            "it with a block_size that divides its rows."
        )
    codes = np.asarray(q.codes)
    if format.group > 1:
        codes = np.asarray(unpack(q.codes, format.bits, format.group))
        codes = codes.reshape(rows, -1)[:, :columns]
    grid = rows, columns // block
    scales = np.asarray(float_scales(q.scales), np.float32)
    if scales.size not in (grid[0] * grid[1], 1):
        scales = scales.reshape(rows, -1)[:, : grid[1]]
    grid_of = lambda x: np.broadcast_to(x.reshape(grid if x.size > 1 else (1, 1)), grid)
    offsets = None if q.offsets is None else np.asarray(q.offsets.astype("float32"))
    return Matrix(
        q,
        codes.reshape(rows, columns),
        grid_of(scales),
        None if offsets is None else grid_of(offsets),
        block,
    )


def check_block(matrix: Matrix, block: int) -> None:
    if matrix.block != block:
        raise NotHeld(
            f"has blocks of {matrix.block}; the library has blocks of {block}. "
            f"Quantize it with block_size={block}."
        )


def power_of_two_scales(matrix: Matrix) -> np.ndarray:
    """Return the biased exponents of MXFP4."""
    scales = matrix.q.scales
    assert isinstance(scales, PowerOfTwoScales)
    return np.asarray(scales.exponents).reshape(matrix.scales.shape)


def float8_scales(matrix: Matrix) -> tuple[np.ndarray, np.float32]:
    """Return the 8-bit scales and the factor of a tensor, or raise [`NotHeld`][]."""
    scales = matrix.q.scales
    assert isinstance(scales, Float8Scales)
    units = np.unique(np.asarray(scales.units, np.float32))
    if len(units) != 1:
        raise NotHeld(
            f"has {len(units)} different factors, one per row; the library has one per "
            "tensor. Quantize it with axis=(0, 1)."
        )
    return np.asarray(scales.codes).reshape(matrix.scales.shape), units[0]


def layer_prefix(name: str, library: str) -> str:
    """Return the name of the layer of a weight, with a dot."""
    prefix = name.removesuffix("weight")
    if prefix == name or (prefix and not prefix.endswith(".")):
        raise NotHeld(
            f"is not named like the weight of a layer; {library} stores quantized "
            "weights whose names end in '.weight'. Rename it, or keep it in floats."
        )
    return prefix


def no_layout(q: QuantizedArray, library: str, layouts: str) -> NoReturn:
    raise NotHeld(
        f"has the format {q.format!r}; {library} stores {layouts}. Quantize "
        "the original weight to one of them."
    )
