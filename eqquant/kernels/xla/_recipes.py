"""The kernels of XLA. The errors are for weights of 4096 columns."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from .._int8 import rounding
from .._int8_sums import longest_int8_sum
from .._product import Kernel, Product
from ._dot import dot


Recipe = Literal["float", "split", "bfloat16", "round", "int8"]


@dataclasses.dataclass(frozen=True)
class XLAKernel(Kernel):
    """A way to multiply in plain XLA, for any platform.

    `bits` is the number of bits of an activation that it keeps; None for all of them.
    """

    name: Recipe
    when: str
    rounding: str
    error: str
    serves: Callable[[Product], bool]
    bits: int | None = None

    def why_not(self, product):
        return None if self.serves(product) else f"{self.name!r} is for {self.when}"

    def lower(self, product, x, codes, scales, x_unit=None, interpret=False):
        return dot(self.name, product, x, codes, scales, x_unit)

    def describe(self, product):
        is_exact = self.name == "bfloat16" and product.x.dtype == jnp.bfloat16
        bits = None if is_exact else self.bits
        return f"XLA, recipe {self.name!r} {rounding(product.x, bits)}"


def _sums_fit(product: Product) -> bool:
    return product.size <= longest_int8_sum


def _may_round(product: Product) -> bool:
    """Whether rounding operands to int8 can pay. A dense product rounds bfloat16
    operands anyway."""
    is_double = jnp.dtype("float64") in (product.x.dtype, product.weight_dtype)
    exact = product.precision == "highest" or is_double
    return not (exact or product.is_all("bfloat16"))


def _stays_int8(product: Product) -> bool:
    integers = product.has_integer_rows and _sums_fit(product)
    return product.is_int8 and integers and not product.contract_rows


def _splits(product: Product) -> bool:
    # Above 2048 rows, splitting takes longer than the product gains.
    is_high = product.precision == "high" and _may_round(product)
    integers = product.has_integer_rows and _sums_fit(product)
    return is_high and integers and product.has_at_most(2048)


def _rounds(product: Product) -> bool:
    # Above 128 rows, bfloat16 is as fast and more accurate, unless the codes are int8.
    is_default = product.precision == "default" and _may_round(product)
    codes_are_int8 = product.has_integer_rows and product.format.bits == 8
    faster = product.has_at_most(128) or codes_are_int8
    return is_default and _sums_fit(product) and faster


def _is_float(product: Product) -> bool:
    return (product.precision != "default" and not product.is_all("bfloat16")) or (
        jnp.dtype("float64") in (product.x.dtype, product.weight_dtype)
    )


KERNELS = (
    XLAKernel(
        "int8",
        "int8 activations with int8 weights, one scale per row, in `x @ w.T`",
        "nothing",
        "float32 rounding of the result",
        _stays_int8,
    ),
    XLAKernel(
        "split",
        '`"high"`, integer levels with one scale per row, up to 2048 rows',
        "activations to two int8 numbers (15 bits)",
        "4e-5",
        _splits,
        15,
    ),
    XLAKernel(
        "round",
        '`"default"`, up to 128 rows, and any number of rows of INT8 weights',
        "activations to int8, and other weights than INT8 to int8 per row",
        "1e-2",
        _rounds,
        8,
    ),
    XLAKernel(
        "float", '`"highest"`, float64, and `"high"`', "nothing", "6e-7", _is_float
    ),
    XLAKernel(
        "bfloat16",
        "everything else",
        "both operands to bfloat16",
        "3e-3",
        lambda product: True,
        8,
    ),
)
# Those that do not multiply int8, for GPUs.
FLOAT_KERNELS = tuple(k for k in KERNELS if k.name in ("float", "bfloat16"))
