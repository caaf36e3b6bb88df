"""Products with quantized weights on TPUs: Pallas kernels that decode on the fly.

The kernels decode a tile of codes in vector memory and multiply at once. They read
codes and scales as they are stored. (TPUs store a narrow matrix transposed, and the
kernels read it in this way.) Only the activation, the small operand, is permuted, split
and padded before.

Memory beyond the end of an array is undefined in the last tile of an axis. So the
activation is padded with zeros there, and scales are masked, because zero times NaN is
not zero.
"""

import dataclasses

import jax.numpy as jnp

from .._int8 import rounding
from .._int8_sums import longest_int8_sum
from .._product import Kernel, Product, View
from . import _decode, _general, _tile_sizes
from ._chips import chip
from ._operands import choose_operands, kind_of
from ._round import can_round_along, round_along, round_rows
from ._tiles import lanes
from ._weights import can_become, is_exact


@dataclasses.dataclass(frozen=True)
class TPUVariant(Kernel):
    """A kernel for TPUs with options.

    `exact_table` is whether a codebook keeps more than 8 bits.
    """

    name: str
    when: str
    rounding: str
    error: str
    exact_table: bool = True

    reads_views = rounds_once = True

    def round_int8(self, x, over):
        return round_rows(x, over)

    def why_not(self, product):
        if reason := _unsupported(product):
            return reason
        chosen = _variant_of(product)
        return None if chosen == self.name else f"variant {chosen!r} is faster"


@dataclasses.dataclass(frozen=True)
class DecodeKernel(TPUVariant):
    """The kernel for few rows. `exact` is whether it keeps more than 8 bits of
    activations."""

    exact: bool = True

    def lower(self, product, x, codes, scales, x_unit=None, interpret=False, view=None):
        out = _decode.dot(
            product,
            *_operands(x, codes, scales, view),
            stacked=_has_stacked_scales(view),
            out_dtype=product.out_dtype if x_unit is None else jnp.float32,
            exact=self.exact,
            exact_table=self.exact_table,
            interpret=interpret,
        )
        out = out.reshape(*x.shape[:-1], out.shape[-1])
        return (out if x_unit is None else out * x_unit).astype(product.out_dtype)

    def describe(self, product):
        here = chip(product.compute.tpu)
        found = choose_operands(product, here, self.exact, self.exact_table)
        rounded = rounding(product.x, found.bits_kept(product.x.dtype))
        variant = f"variant {self.name!r}, weights as {found.weights}"
        return f"Pallas kernel, {variant} {rounded}"


@dataclasses.dataclass(frozen=True)
class GeneralKernel(TPUVariant):
    """The kernel for any shape. `operand` is the dtype that it multiplies."""

    operand: str = "float32"

    def lower(self, product, x, codes, scales, x_unit=None, interpret=False, view=None):
        out = _general.dot(
            product,
            *_operands(x, codes, scales, view),
            stacked=_has_stacked_scales(view),
            x_unit=None if x_unit is None else _flat(x_unit),
            operand=jnp.dtype(self.operand),
            exact_table=self.exact_table,
            interpret=interpret,
        )
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def describe(self, product):
        # Variants that round the table keep all of a bfloat16 activation as well.
        rounds = self.operand == "bfloat16" and product.x.dtype != jnp.bfloat16
        rounded = rounding(product.x, 8 if rounds else None)
        return f"Pallas kernel, variant {self.name!r} {rounded}"


def _flat(a):
    return a.reshape(-1, *a.shape[-2:])


def _operands(x, codes, scales, view: View | None) -> tuple:
    """Return the activation, codes, scales and index, each with one axis of matrices
    in front."""
    if view is not None and not _has_stacked_codes(view):
        codes, view = view.take(view.codes), None
    if view is None:
        return *map(_flat, (x, codes, scales)), None
    scales = view.scales if _has_stacked_scales(view) else scales
    return *map(_flat, (x, view.codes, scales)), view.flat_index


# TPUs store a matrix transposed if that needs less padding. Kernels read scales like
# this, but not codes, and not if XLA puts the axis of layers between the other axes.
# Otherwise XLA would copy the whole stack, so that a slice of one layer is faster.
_sublanes = 8  # Rows of a tile of 32-bit numbers.


def _has_stacked_codes(view: View) -> bool:
    """Return whether the kernel reads the codes of a layer in the stack."""
    return view.codes.shape[-1] % lanes == 0


def _has_stacked_scales(view: View | None) -> bool:
    """Return whether the kernel reads the scales of a layer in the stack."""
    if view is None or view.scales is None or not _has_stacked_codes(view):
        return False
    blocks = view.scales.shape[-1]
    return blocks <= _sublanes or blocks % _sublanes == 0


def _variant_of(product: Product) -> str:
    """Return the name of the fastest kernel that is exact enough."""
    here, precision = chip(product.compute.tpu), product.precision
    format, requested = product.format, here.options
    floats = jnp.bfloat16 not in (product.x.dtype, product.weight_dtype)
    few = not product.contract_rows and _decode.fits(product, here)
    decodes = few and precision != "highest" and requested.kernel != "general"

    exact_table = requested.exact_table
    if exact_table is None:
        # A second lookup is cheap only if the chip needs it anyway, or if products hide
        # it.
        needed = kind_of(format, product.x.dtype, False, here) == "float8"
        hidden = needed if decodes else product.m >= 1024
        is_exact_enough = precision == "high" and (floats or hidden)
        exact_table = precision == "highest" or is_exact_enough
    looked_up = format.codebook is not None and can_become("int8", format, here)
    rounds = looked_up and not exact_table and not is_exact(format)
    rounded = ", rounded table" if rounds else ""
    if decodes:
        return "decode" + (", rounded" if precision == "default" else rounded)

    integers = format.integer_levels and format.block_size is None
    if product.is_int8 and integers and not product.contract_rows:
        return "int8" if here.int8 else "bfloat16"
    return "float32" if floats and precision != "default" else "bfloat16" + rounded


def _unsupported(product: Product) -> str | None:
    """Return why no kernel computes a product."""
    format = product.format
    if reason := product.too_wide("kernels for TPU compute"):
        return reason
    if product.is_empty:
        return "there is nothing to multiply"
    if format.history and not can_become("int8", format, chip(product.compute.tpu)):
        return product.has_history
    if format.bits == 8 and not (format.integer_levels or format.float8):
        return f"there are no kernels for TPU for codes like those of {format.name}"
    if format.centred[1]:
        return "the levels are not centred"
    if format.bits not in (1, 2, 3, 4, 5, 6, 8):
        return f"there are no kernels for TPU for codes of {format.bits} bits"
    if format.bits == 3 and format.group % 32:
        return f"blocks of {format.block_size} are no whole words"
    if not _tile_sizes.fits(product):
        return f"blocks of {format.block_size} are too long for a tile"
    return None


def multiplies_int8(a: tuple, b: tuple, over: tuple[int, int]) -> bool:
    """Check whether [`INT8`][] takes int8 operands of these shapes, which contract axis
    `over[0]` of `a` with axis `over[1]` of `b`."""
    sizes = *a[-2:], *b[-2:]
    if not chip().int8 or not all(isinstance(size, int) for size in (*a, *b)):
        return False
    # The kernel would pad a copy of other operands, and the sum would overflow int32.
    return all(s % lanes == 0 for s in sizes) and a[over[0]] <= longest_int8_sum


def matrix_units() -> tuple[str, ...]:
    """Return the narrow numbers that the matrix units of the chip multiply."""
    units = {"int8": chip().int8, "float8": chip().float8 == jnp.float8_e4m3fn}
    return tuple(name for name, is_there in units.items() if is_there)


_FEW = "up to 32 rows in `x @ w.T`"
_MANY = "any shape"
INT8 = GeneralKernel(
    "int8",
    "int8 activations, integer levels with one scale per row, in `x @ w.T`",
    "nothing",
    "float32 rounding of the result",
    operand="int8",
)
# The first kernel that serves a product computes it.
KERNELS = (
    DecodeKernel(
        "decode",
        f'{_FEW}, `"high"`',
        "activations and NF4 tables to 15 bits",
        "4e-5; NF4 by bfloat16 2e-4",
    ),
    DecodeKernel(
        "decode, rounded table",
        f'{_FEW}, `"high"`, a codebook with a bfloat16 operand',
        "the table to int8",
        "6e-3",
        exact_table=False,
    ),
    DecodeKernel(
        "decode, rounded",
        f'{_FEW}, `"default"`',
        "activations to int8 or bfloat16, and the table to int8",
        "1e-2",
        exact_table=False,
        exact=False,
    ),
    INT8,
    GeneralKernel("float32", f"{_MANY}, float32", "nothing", "1e-6"),
    GeneralKernel(
        "bfloat16",
        f'{_MANY}, `"default"` or a bfloat16 operand',
        "both operands to bfloat16",
        "3e-3",
        operand="bfloat16",
    ),
    GeneralKernel(
        "bfloat16, rounded table",
        "the same with a codebook",
        "both operands to bfloat16, and the table to int8",
        "6e-3",
        exact_table=False,
        operand="bfloat16",
    ),
)
