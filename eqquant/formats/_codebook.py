"""Formats with a table of levels: any table, and two for normal weights."""

import dataclasses
from typing import Any

import numpy as np

from ._divide import divide_blocks
from ._fitted import DoubleQuantization, Fit, FittedFormat, LowBitFormat
from ._table import count_below, midpoints


class TableFormat(FittedFormat):
    """A format whose codes are indices of its `table`."""

    @property
    def codebook(self):
        # Codes without a level decode to the highest level.
        table = tuple(self.table)
        return table + table[-1:] * (2**self.bits - len(table))

    @property
    def unused_codes(self):
        return tuple(range(len(self.table), 2**self.bits))

    @property
    def largest_level(self):
        return max(-self.table[0], self.table[-1])

    @property
    def highest_level(self):
        return self.table[-1]

    @property
    def padding_code(self):
        return min(range(len(self.table)), key=lambda code: abs(self.table[code]))

    def nearest(self, blocks, scales):
        relative = divide_blocks(blocks, scales)
        return count_below(relative, midpoints(self.table, np.dtype(relative.dtype)))


class NF3(LowBitFormat, TableFormat):
    """3 bits: eight levels for normal weights, times a scale.

    The levels minimise the mean squared error for normally distributed values (Lloyd
    and Max, IEEE Transactions on Information Theory 28, 1982, and 6, 1960). They are
    divided by the largest level. No level is zero.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.NF3(block_size=32))
        assert 8 * q.nbytes / q.size == 3.5
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale; `None` for one
        scale per channel.
    - `scale_dtype`: the dtype of scales and offsets: float32, bfloat16, float16
        or float64.
    - `fit`, `affine`: the algorithm that chooses scales, as in [`eqquant.Int4`][].
    - `double_quantization`: store scales in 8 bits, as in [`eqquant.NF4`][].
    """

    name = "nf3"
    bits = 3
    table = (
        -1.0,
        -0.6245089173316956,
        -0.35131242871284485,
        -0.11389422416687012,
        0.11389422416687012,
        0.35131242871284485,
        0.6245089173316956,
        1.0,
    )


class NF2(LowBitFormat, TableFormat):
    """2 bits: four levels for normal weights, times a scale.

    Everything else is as in [`eqquant.NF3`][].

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nf2")
        assert 8 * q.nbytes / q.size == 2.25
        ```
    """

    name = "nf2"
    bits = 2
    table = (-1.0, -0.29977142810821533, 0.29977142810821533, 1.0)


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Codebook(TableFormat):
    """A table of levels that you choose, times a scale.

    !!! Example

        ```python
        import eqquant
        import jax

        format = eqquant.formats.Codebook((-1, -0.4, 0, 0.4, 1), block_size=32)
        assert format.bits == 3
        weight = jax.random.normal(jax.random.key(0), (8, 64))
        assert (eqquant.quantize(weight, format).dequantize() == 0).any()
        ```

    The largest magnitude of a block is mapped to the level with the largest magnitude.
    The scale is negative if their signs differ. A value is rounded to the nearest
    level, and to the lower level in a tie.

    **Arguments:**

    - `values`: 2 to 16 levels, in any order, rounded to float32. Two levels take 1 bit,
        up to four take 2 bits, up to eight take 3 bits, and more take 4 bits.
    - `block_size`: the number of consecutive values that share a scale; `None` for one
        scale per channel.
    - `scale_dtype`: the dtype of scales and offsets: float32, bfloat16, float16
        or float64.
    - `fit`, `affine`: the algorithm that chooses scales, as in [`eqquant.Int4`][].
    - `double_quantization`: store scales in fewer bits, as in [`eqquant.Int4`][].

    **Raises:**

    `ValueError` if `values` are not 2 to 16 finite numbers, all different in float32.
    """

    values: tuple[float, ...]
    fit: Fit
    affine: bool
    double_quantization: DoubleQuantization = False

    name = "codebook"

    def __init__(
        self,
        values: Any,
        block_size: int | None = 64,
        scale_dtype: Any = "float32",
        fit: Fit = "absmax",
        affine: bool = False,
        double_quantization: DoubleQuantization = False,
    ):
        fields = {"values": _checked(values), "block_size": block_size}
        fields |= {"scale_dtype": scale_dtype, "fit": fit, "affine": affine}
        fields["double_quantization"] = double_quantization
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        self.__post_init__()

    @property
    def table(self):
        return self.values

    @property
    def bits(self):
        return max(1, (len(self.values) - 1).bit_length())


def _checked(values: Any) -> tuple[float, ...]:
    given = np.zeros(0)
    try:
        given = np.asarray(values, np.float32)
        ok = given.ndim == 1 and 2 <= given.size <= 16
        ok = (
            ok and np.all(np.isfinite(given)) and len(set(given.tolist())) == given.size
        )
    except (TypeError, ValueError):
        ok = False
    if not ok:
        raise ValueError(
            "Codebook: values must be 2 to 16 finite numbers, all different in "
            f"float32, got {values!r}."
        )
    return tuple(sorted(given.tolist()))
