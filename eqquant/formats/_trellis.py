"""Trellis-coded quantization: a level depends on a code and on the codes before it."""

import dataclasses
import functools as ft
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from .._jax import check_one_of
from ._divide import divide_blocks, true_divide
from ._format import bound_scales, Format, sum_blocks
from ._history import LinearTable


# The bits of a state: a code, and the codes before it.
_window = 12
# The masks of a code select bits of a window, whose lowest bits are the newest code.
# The parities of the selected bits are the bits of an index into a table of levels, the
# highest bit first. The masks are shifts of the whole bit stream. The tables minimise
# the mean squared error for normal values (Lloyd's algorithm). The second half of a
# table is the negative of the first. Normal values with the standard deviation `_units`
# are encoded best.
_masks = {
    2: (0x102, 0x801, 0x84, 0x60, 0x140),
    3: (0x204, 0x402, 0x801, 0xED0, 0xD28, 0x3C0),
    4: (0x18, 0x804, 0x402, 0x201, 0x880, 0x22, 0x11),
}
_halves = {
    2: (-127, -90, -82, -68, -63, -51, -46, -38, -39, -30, -26, -22, -14, -8, -3, 1),
    3: (
        *(-127, -99, -82, -78, -69, -64, -60, -55, -53, -50, -46, -42, -41, -38, -35),
        *(-32, -30, -28, -27, -23, -21, -20, -17, -15, -15, -12, -9, -8, -8, -5, -2),
        -2,
    ),
    4: (
        *(-127, -104, -90, -82, -77, -72, -69, -65, -63, -61, -58, -57, -54, -53, -50),
        *(-49, -47, -47, -45, -44, -41, -41, -39, -38, -36, -35, -34, -33, -32, -31),
        *(-30, -30, -27, -26, -26, -25, -24, -23, -22, -22, -19, -19, -18, -18, -16),
        *(-16, -15, -14, -13, -12, -11, -11, -9, -8, -9, -8, -5, -5, -4, -4, -2, -2),
        *(-2, -1),
    ),
}
_units = {2: 53.186383, 3: 45.724290, 4: 41.520951}


@dataclasses.dataclass(frozen=True, repr=False)
class Trellis(Format):
    """Trellis codes of 2, 3 or 4 bits: a code selects a level together with the codes
    before it in its block, so that few bits choose among 32 to 128 levels.

    On normal weights, it is 1.8 dB better than [`eqquant.NF2`][], [`eqquant.NF3`][] and
    [`eqquant.NF4`][] with fewer bits, because scales are for 256 values. Calibrate, and
    rotate weights that are far from normal: `quantize_tree(..., rotate=True)`. No level
    is zero. Quantizing a dequantized array may change codes and scales.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.formats.Trellis(bits=2))
        assert 8 * q.nbytes / q.size == 2.0625
        ```

    Consecutive codes share a byte, the first in its lowest bits. For 3 bits, a block
    has two parts. The first part contains the low 2 bits of each code. In byte `i` of
    the second part, the even bits are the highest bits of codes `4 i` to `4 i + 3`. The
    odd bits belong to the same codes in the second half of the block. The codes before
    the first code of a block are zero.

    The codes follow "Trellis coded quantization" (Marcellin and Fischer, IEEE
    Transactions on Communications 38, 1990), with a table indexed by a window of the
    bit stream as in QTIP (arXiv 2406.11235). The window is a linear code, and the
    tables are trained.

    **Arguments:**

    - `bits`: 2, 3 or 4.
    - `block_size`: the number of consecutive values that share a scale, and after which
        the history starts again. Rows are padded to whole blocks: for rows of 576
        values, 192 needs no padding.
    - `scale_dtype`: the dtype of scales: float32, bfloat16, float16 or float64.

    **Raises:**

    `ValueError` if `bits` is not 2, 3 or 4, or if `block_size` is not a positive
    multiple of 8.
    """

    bits: int = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    block_size: int | None = 256
    scale_dtype: Any = "bfloat16"

    name: ClassVar[str] = "trellis"
    integer_levels = True
    largest_level = 127

    def __post_init__(self):
        check_one_of("Trellis", "bits", self.bits, _masks)
        super().__post_init__()
        if self.block_size is None or self.block_size % 8:
            raise ValueError(
                "Trellis: block_size must be a positive multiple of 8, got "
                f"{self.block_size}. A trellis has a block in which it starts."
            )

    @property
    def history(self):
        return _window // self.bits - 1

    @property
    def linear_table(self):
        return _linear_table(self.bits)

    def levels(self, codes, dtype):
        table = jnp.asarray(_table(self.bits), dtype)
        return table.at[codes].get(mode="promise_in_bounds")

    def choose_scales(self, blocks, absmax, counts, limit):
        # Error feedback makes later values larger. Measured on MiniLM.
        return self._from_squares(blocks, absmax, counts, limit, 1.05)

    def _from_squares(self, blocks, absmax, counts, limit, factor):
        # Relative to absmax, so that no square overflows.
        relative = divide_blocks(blocks, absmax)
        mean = true_divide(sum_blocks(jnp.square(relative)), counts)
        scales = jnp.sqrt(mean) * absmax * (factor / _units[self.bits])
        return self._bounded(scales, absmax, limit)

    def encode(self, blocks, absmax, counts, limit):
        start = self._from_squares(blocks, absmax, counts, limit, 1.0)
        codes, levels = self._nearest(blocks, start)
        # The scale of the least squared error for these levels.
        size = blocks.shape[-1]
        is_real = np.arange(size) < np.asarray(counts)[:, None]
        levels = jnp.where(is_real, levels.astype(blocks.dtype), 0)
        relative = divide_blocks(blocks, absmax)
        share = sum_blocks(relative * levels) / sum_blocks(jnp.square(levels))
        scales = jnp.where(share > 0, share * absmax, start.astype(absmax.dtype))
        return codes, self._bounded(scales, absmax, limit)

    def nearest(self, blocks, scales):
        return self._nearest(blocks, scales)[0]

    def _nearest(self, blocks, scales):
        """Return the best codes of each block for its scale, and their levels."""
        relative = divide_blocks(blocks, scales.astype(blocks.dtype))
        rows = relative.astype(jnp.float32).reshape(-1, blocks.shape[-1])
        codes, levels = _viterbi(rows, self.bits)
        return codes.reshape(blocks.shape), levels.reshape(blocks.shape)

    def _bounded(self, scales, absmax, limit):
        return bound_scales(
            scales, absmax, self.scale_dtype, limit, largest=self.largest_level
        )


@ft.cache
def _linear_table(bits: int) -> LinearTable:
    """Return the table for states whose highest bits are the newest code."""
    half = _halves[bits]
    masks = _reversed(np.array(_masks[bits][::-1]), bits)
    levels = (*half, *(-level for level in reversed(half)))
    return LinearTable(tuple(map(int, masks)), levels)


@ft.cache
def _table(bits: int) -> np.ndarray:
    """Return the level of each state, as int8."""
    return _linear_table(bits).of_states(_window)


def _reversed(states: np.ndarray, bits: int) -> np.ndarray:
    """Reverse the order of the codes of states."""
    parts = [states >> place & (2**bits - 1) for place in range(0, _window, bits)]
    return np.sum([part << bits * i for i, part in enumerate(reversed(parts))], 0)


def _viterbi(
    x: Float[Array, "rows size"], bits: int
) -> tuple[UInt8[Array, "rows size"], Float[Array, "rows size"]]:
    """Return the codes with the least squared error, and their levels, by Viterbi's
    algorithm (IEEE Transactions on Information Theory 13, 1967)."""
    count, kept = 2**bits, 2 ** (_window - bits)
    rows, _ = x.shape
    # A window here has the newest code in its lowest bits, and starts with its oldest
    # code. So the costs of windows that end in the same state are far apart in memory.
    newest_low = _reversed(np.arange(2**_window), bits)
    table = jnp.asarray(_table(bits)[newest_low], jnp.float32)
    by_oldest = table.reshape(1, count, kept // count, count)
    codes_of_keys = jnp.arange(count, dtype=jnp.int32)[None, :, None, None]

    def step(cost, x):
        before = cost.reshape(rows, count, kept // count, 1)
        costs = before + jnp.square(x[:, None, None, None] - by_oldest)
        # XLA:CPU does not vectorise `argmin`. So the lowest bits of a cost are a code.
        # They change it by less than 2**-18.
        keys = lax.bitcast_convert_type(costs, jnp.int32) & ~(count - 1)
        best = jnp.min(keys | codes_of_keys, 1).reshape(rows, kept)
        cost = lax.bitcast_convert_type(best & ~(count - 1), jnp.float32)
        return cost, (best & (count - 1)).astype(jnp.uint8)

    def back(state, oldest):
        first = jnp.take_along_axis(oldest, state[:, None], 1)[:, 0]
        window = (first.astype(jnp.int32) << (_window - bits)) | state
        return window >> bits, window

    start = jnp.where(jnp.arange(kept) == 0, 0.0, 1e30)
    start = jnp.broadcast_to(start.astype(x.dtype)[None], (x.shape[0], kept))
    cost, oldest = lax.scan(step, start, x.T)
    last = jnp.argmin(cost, 1).astype(jnp.int32)
    _, windows = lax.scan(back, last, oldest, reverse=True)
    codes = (windows.T & (count - 1)).astype(jnp.uint8)
    return codes, table.at[windows.T].get(mode="promise_in_bounds")
