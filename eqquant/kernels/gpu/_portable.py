"""Products with quantized weights on GPUs in plain XLA.

A GPU pays for each kernel launch and for each byte. So codes are decoded either inside
of the kernel that multiplies, or in tiles of the size of its cache, with one kernel
launch for each.
"""

import dataclasses
import functools as ft
import math
import os
from typing import Literal

import jax
import jax.numpy as jnp

from ...formats import is_in_two_parts
from .._int8 import rounding
from .._int8_sums import gpu_sums_int8, longest_float32_sum, longest_int8_sum
from .._product import Kernel, Product
from . import _fused, _reduce, _tiles
from ._parts import num_parts


@dataclasses.dataclass(frozen=True)
class PortableKernel(Kernel):
    """A way to multiply in XLA for GPUs."""

    name: Literal["reduce", "fused", "tiles"]
    when: str
    rounding: str
    error: str

    def why_not(self, product):
        if reason := why_nothing(product):
            return reason
        name, _ = _variant_of(product)
        if name != self.name:
            return f"{self.name!r} is for {self.when}"
        if self.name == "tiles" and product.contract_rows:
            columns = product.columns
            if 2 * _tiles.step_of(columns, product.blocks, product.format) > columns:
                return "a tile of whole blocks, or groups of codes, would be all of it"
        return None

    def lower(self, product, x, codes, scales, x_unit=None, interpret=False):
        _, operand = _variant_of(product)
        if x_unit is None:
            return self._for_each(product, operand, x, codes, scales)
        wide = dataclasses.replace(product, out_dtype=jnp.dtype("float32"))
        out = self._for_each(wide, operand, x, codes, scales)
        return (out * x_unit).astype(product.out_dtype)

    def _for_each(self, product: Product, operand: str, *arrays):
        dot = ft.partial(_DOTS[self.name], product, operand)
        if not product.batch:
            return dot(*arrays)
        flat = [a.reshape(-1, *a.shape[-2:]) for a in arrays]
        if math.prod(product.batch) == 1:
            out = dot(*(a[0] for a in flat))
        elif self.name == "tiles":
            # In turn, so that only one tile of one weight is decoded at a time.
            out = jax.lax.map(lambda args: dot(*args), tuple(flat))
        else:
            out = jax.vmap(dot)(*flat)
        return out.reshape(*product.batch, *out.shape[-2:])

    def describe(self, product):
        _, operand = _variant_of(product)
        bits = None
        scaled = product.contract_rows and product.has_integer_rows
        holds = product.x.dtype == jnp.bfloat16 or product.is_int8
        if operand == "bfloat16" and (scaled or not holds):
            bits = 8 * num_parts(product)[0]
        name = f"{self.name}, {operand}"
        return f"XLA for GPUs, variant {name!r} {rounding(product.x, bits)}"


def _variant_of(product: Product) -> tuple[str, str]:
    """Return how a product is computed, and in which dtype.

    bfloat16 keeps 16 bits of activations and of scaled weights, as two numbers (5e-6).
    With precision `"default"`, or if both operands are bfloat16, it is one number.
    """
    whole, contract_rows = product.has_integer_rows, product.contract_rows
    # Up to four rows, the arithmetic of a sum costs less than a decoded weight. The sum
    # reads whole codes from a byte.
    format = product.format
    in_one_byte = not (is_in_two_parts(format.bits) or format.history)
    if product.m <= 4 and not contract_rows and in_one_byte:
        return "reduce", "float32"
    name = "fused" if whole and product.format.bits == 8 else "tiles"
    if product.is_int8 and whole and not contract_rows:
        if gpu_sums_int8(product.size) and product.size <= longest_int8_sum:
            return name, "int8"
        if product.size <= longest_float32_sum:
            return name, "bfloat16"
    # A scaled float16 activation may underflow.
    if product.is_all("float16") and not (whole and contract_rows):
        return name, "float16"
    if product.precision == "highest" and not product.is_all("bfloat16"):
        return name, "float32"
    return name, "bfloat16"


def why_nothing(product: Product) -> str | None:
    """Return why no kernel for GPUs computes a product."""
    if os.environ.get("EQQUANT_GPU") == "off":
        return "EQQUANT_GPU=off turns it off"
    if reason := product.too_wide("the lowering for GPUs computes"):
        return reason
    return "there is nothing to multiply" if product.is_empty else None


_DOTS = {"reduce": _reduce.dot, "fused": _fused.dot, "tiles": _tiles.dot}
_OPERANDS = "activations and weights to the dtype of the operands"
KERNELS = (
    PortableKernel(
        "reduce",
        "up to 4 rows in `x @ w.T`, except for 3, 5 and 6 bits and trellis codes",
        "nothing",
        "6e-7",
    ),
    PortableKernel(
        "fused", "INT8 codes with one scale per row", _OPERANDS, "6e-7 to 3e-3"
    ),
    PortableKernel("tiles", "everything else", _OPERANDS, "6e-7 to 3e-3"),
)
