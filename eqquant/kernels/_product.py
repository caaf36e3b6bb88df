"""Products as values, and the interface of the kernels that compute them."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from .._jax import wide_dtype
from ..formats import Format, num_codes
from ._compute import Compute, Precision
from ._int8 import round_int8


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static parameters of a product with a quantized weight.

    **Fields:**

    - `format`: the format of the weight.
    - `contract_rows`: whether the product is `x @ w` rather than `x @ w.T`.
    - `compute`: precision, rounding of activations, and choices of kernels.
    - `weight_dtype`: the dtype of the dequantized weight.
    - `out_dtype`: the dtype of the result.
    - `shift`: a number whose multiple by a scale is added to the offset of a block.
    """

    format: Format
    contract_rows: bool = False
    compute: Compute = dataclasses.field(default_factory=Compute)
    weight_dtype: Any = "float32"
    out_dtype: Any = "float32"
    shift: int = 0

    def __post_init__(self):
        for name in ("weight_dtype", "out_dtype"):
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)))

    @property
    def wide(self) -> "Matmul":
        """The same product with a result of at least float32, to add offsets to."""
        return dataclasses.replace(self, out_dtype=wide_dtype(self.out_dtype))

    def with_compute(self, **fields: Any) -> "Matmul":
        return dataclasses.replace(self, compute=self.compute.updated(**fields))

    def of(self, x: Any, codes: Any, scales: Any) -> "Product":
        """Return the product for operands. Only their shapes and dtypes are read.

        If the product rounds activations to int8, its `x` is the rounded activation.
        """
        dtype = jnp.int8 if self.compute.activations == "int8" else x.dtype
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Matmul)}
        operand = lambda a, dtype: Operand(tuple(a.shape), jnp.dtype(dtype))
        return Product(
            operand(x, dtype),
            operand(codes, codes.dtype),
            operand(scales, scales.dtype),
            **fields,
        )


class View(eqx.Module):
    """The matrices of a product, as entries of a stack, where a kernel can read them.

    **Fields:**

    - `index`: `(*first)`, the position of each matrix. An index out of bounds is
        clamped.
    - `codes`: `(stack, *others, rows, packed)`. The batch axes of the product are
        `(*first, *others)`.
    - `scales`, `offsets`: `(stack, *others, rows, blocks)`. If scales are None, the
        scales and offsets of the product are not entries of a stack. Offsets are also
        None for a product without offsets.
    """

    index: Any  # These may be types of arrays.
    codes: Any
    scales: Any = None
    offsets: Any = None

    def take(self, part: Any) -> Any:
        """Return the entries of a stack, as copies."""
        take = lambda a: jnp.take(a, self.index, axis=0, mode="clip")
        if not self.index.ndim:
            # XLA fuses a slice, unlike a gather.
            take = lambda a: lax.dynamic_index_in_dim(a, self.index, keepdims=False)
        return jax.tree.map(take, part)

    @property
    def flat_index(self) -> Int[Array, " batch"]:
        """The positions of all matrices of the product, if `others` are merged into
        the first axis of the stack."""
        stack, *others, _, _ = self.codes.shape
        count = math.prod(others)
        index = jnp.clip(self.index, 0, stack - 1).astype(jnp.int32).reshape(-1, 1)
        return (index * count + jnp.arange(count, dtype=jnp.int32)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Operand:
    shape: tuple[Any, ...]  # A size may be symbolic.
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Product:
    """A product without its data: the shapes and dtypes of its operands, and the fields
    of [`Matmul`][]. Kernels are chosen by it."""

    x: Operand
    codes: Operand
    scales: Operand
    format: Format
    contract_rows: bool
    compute: Compute
    weight_dtype: np.dtype
    out_dtype: np.dtype
    shift: int

    @property
    def precision(self) -> Precision:
        return self.compute.precision

    @property
    def batch(self) -> tuple[Any, ...]:
        """The axes of a stack of weights."""
        return self.codes.shape[:-2]

    @property
    def m(self) -> Any:
        """The number of rows of the activation."""
        return self.x.shape[-2]

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is a symbol, as in `jax.export` with any batch size."""
        sizes = (*self.x.shape, *self.codes.shape)
        return not all(isinstance(n, int) for n in sizes)

    def has_at_most(self, rows: int) -> bool:
        """Return whether the activation has at most `rows` rows, for certain."""
        return isinstance(self.m, int) and self.m <= rows

    @property
    def size(self) -> int:
        """The length of the contracted axis."""
        return self.x.shape[-1]

    @property
    def rows(self) -> int:
        """The number of rows of the weight."""
        return self.codes.shape[-2]

    @property
    def packed(self) -> int:
        """The number of stored bytes in a row of the weight."""
        return self.codes.shape[-1]

    @property
    def columns(self) -> int:
        """The stored number of columns of the weight."""
        return num_codes(self.packed, self.format.bits)

    @property
    def free(self) -> int:
        """The length of the axis of the weight that stays in the result."""
        return self.columns if self.contract_rows else self.rows

    @property
    def blocks(self) -> int:
        """The number of scales in a row of the weight."""
        return self.scales.shape[-1]

    @property
    def has_integer_rows(self) -> bool:
        """True if the levels are integers, and a row has one scale."""
        return self.format.integer_levels and self.blocks == 1

    @property
    def is_int8(self) -> bool:
        """True if the activation is int8."""
        return self.x.dtype == jnp.int8

    @property
    def is_empty(self) -> bool:
        return 0 in (*self.x.shape, *self.codes.shape)

    def is_all(self, dtype: Any) -> bool:
        """Return whether the activation and the weight both have this dtype."""
        return self.x.dtype == self.weight_dtype == jnp.dtype(dtype)

    @property
    def has_history(self) -> str | None:
        """A reason if a level depends on several codes."""
        if self.format.history:
            return f"there are no kernels for codes like those of {self.format.name}"
        return None

    def too_wide(self, computes: str) -> str | None:
        """Return a reason if an operand is wider than float32."""
        for dtype in (self.x.dtype, self.weight_dtype, self.scales.dtype):
            if dtype.itemsize > 4:
                return f"{computes} in float32 at most, not in {dtype}"
        return None


class Kernel(abc.ABC):
    """A way to compute products.

    **Attributes:**

    - `name`: the name in `explain` and in tables.
    - `when`: a short description of the products that it serves.
    - `rounding`: a short description of its rounding.
    - `error`: the relative error (Frobenius norm), for normal operands.
    """

    name: str
    when: str
    rounding: str
    error: str

    @abc.abstractmethod
    def why_not(self, product: Product) -> str | None:
        """Return why it does not serve a product, or None if it does."""

    @abc.abstractmethod
    def lower(
        self,
        product: Product,
        x: Float[Array, "*batch m size"] | Int8[Array, "*batch m size"],
        codes: Array,
        scales: Float[Array, "*batch rows blocks"],
        x_unit: Float[Array, "*batch m 1"] | None = None,
        interpret: bool = False,
    ) -> Float[Array, "*batch m out"]:
        """Compute a product. An int8 activation stands for its integers times
        `x_unit`. `interpret` is for kernels of Pallas."""

    @abc.abstractmethod
    def describe(self, product: Product) -> str:
        """Return the name, the options, and the rounding of the activation."""

    def round_int8(
        self, x: Float[Array, "*m size"], over: tuple[str, ...]
    ) -> tuple[Int8[Array, "*m size"], Float[Array, "*m 1"]]:
        """Round the activation, whose rows are split over the mesh axes `over`."""
        return round_int8(x, over)

    def scale_dtype(self, product: Product) -> np.dtype:
        """Return the dtype to which scales of two levels are decoded for `lower`."""
        return product.scales.dtype

    # True if `lower` accepts scales as they are stored, rather than decoded.
    reads_short_scales: ClassVar[bool] = False
    # True if `lower` accepts the keyword argument `view`, and reads codes and scales in
    # its stacks. Then `codes` is the stack as well.
    reads_views: ClassVar[bool] = False

    # True if `lower` accepts the offsets of an affine weight as a keyword argument.
    reads_offsets: ClassVar[bool] = False
    # True if `round_int8` is the only rounding of an int8 activation.
    rounds_once: ClassVar[bool] = False
    # True if the kernel itself rounds each row of the activation to int8.
    rounds_to_int8: ClassVar[bool] = False


def choose(kernels: Sequence[Kernel], product: Product) -> Kernel | str:
    """Return the first kernel that serves a product, or the reason of the last one."""
    reason: str | None = "there are no kernels"
    for kernel in kernels:
        reason = kernel.why_not(product)
        if reason is None:
            return kernel
    assert reason is not None
    return reason


def table(kernels: Sequence[Kernel]) -> str:
    """Format kernels as a Markdown table, in the order in which they are tried."""
    head = "| kernel | products | rounding | error |\n|---|---|---|---|\n"
    rows = (f"| {k.name} | {k.when} | {k.rounding} | {k.error} |\n" for k in kernels)
    return head + "".join(rows)
