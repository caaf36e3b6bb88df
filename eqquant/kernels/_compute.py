"""How products are computed: precision, rounding of activations, choice of kernels."""

import dataclasses
from typing import Any, get_type_hints, Literal, TypeAlias

from beartype.door import is_bearable

from .._jax import not_accepted, wrong


Precision: TypeAlias = Literal["highest", "high", "default"]
Activations: TypeAlias = Literal["float", "int8"]
_TPUName: TypeAlias = Literal["decode", "general"]
_GPUName: TypeAlias = Literal["mosaic", "triton", "xla"]


@dataclasses.dataclass(frozen=True)
class TPUKernel:
    """The kernel for TPUs and its tiles, in place of eqquant's own choice.

    It is part of an [`eqquant.kernels.Compute`][]. On other platforms it has no effect.

    !!! Example

        ```python
        import eqquant
        import jax

        w = jax.random.normal(jax.random.key(0), (512, 512))
        compute = eqquant.kernels.Compute(tpu=eqquant.kernels.TPUKernel(lookup=False))
        w = eqquant.quantize(w, "nf4", compute=compute)
        x = jax.numpy.ones((8, 512))
        print(eqquant.debug.explain(lambda x, w: x @ w.T, x, w, platform="tpu"))
        ```

    **Arguments:**

    - `kernel`: `"general"`, or `"decode"` for products with at most 32 rows that this
        kernel supports. Other products use the general kernel.
    - `lookup`: whether the hardware looks up codebooks. Without it, the general kernel
        decodes them by comparisons, which is slower.
    - `exact_table`: whether each entry of a codebook keeps at least 13 bits, rather
        than 7. This takes a second lookup. By default tables are exact for float32
        products, and for bfloat16 where the second lookup is cheap. Otherwise the
        relative error is 6e-3.
    - `tile_m`: the maximum number of activation rows in a tile (general kernel).
    - `tile_n`: the tile size along the other axis of the result (both kernels).
    - `tile_k`: the approximate tile size along the contracted axis (general kernel).

    Tiles shrink where the shapes require it. The compiler rejects a tile that does not
    fit into the memory of the chip.
    """

    kernel: _TPUName | None = None
    lookup: bool = True
    exact_table: bool | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    tile_k: int | None = None

    def __post_init__(self):
        _check_fields(self)
        for name in ("tile_m", "tile_n", "tile_k"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or size < 1):
                accepted = "a positive integer or None"
                raise ValueError(wrong("TPUKernel", name, size, accepted))


@dataclasses.dataclass(frozen=True)
class GPUKernel:
    """The kernel for GPUs, in place of eqquant's own choice.

    It is part of an [`eqquant.kernels.Compute`][]. On other platforms it has no effect.

    !!! Example

        ```python
        import eqquant
        import jax

        w = jax.random.normal(jax.random.key(0), (512, 512))
        compute = eqquant.kernels.Compute(gpu=eqquant.kernels.GPUKernel(kernel="xla"))
        w = eqquant.quantize(w, "nf4", compute=compute)
        x = jax.numpy.ones((8, 512))
        print(eqquant.debug.explain(lambda x, w: x @ w.T, x, w, platform="gpu"))
        ```

    **Arguments:**

    - `kernel`: `"triton"` decodes and multiplies any number of rows. `"mosaic"` serves
        many rows on an H100 or H200, and decodes while tensor cores multiply. XLA
        computes products that the requested kernel does not support. `"xla"` always
        uses XLA.
    - `check`: whether a kernel must pass a check before its first product on a device.
        The check compares it with XLA on small data. If it fails, eqquant warns and
        uses XLA.
    """

    kernel: _GPUName | None = None
    check: bool = True

    def __post_init__(self):
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class Compute:
    """How products with a quantized array are computed.

    It is a static field of every [`eqquant.QuantizedArray`][], beside the format. It
    does not change codes or scales, and checkpoints do not store it. JAX compiles again
    for another `Compute`. [`eqquant.with_compute`][] changes it for a whole model.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 128))
        q = eqquant.quantize(weight, "int8", precision="default")
        assert q.compute == eqquant.kernels.Compute(precision="default")
        ```

    **Arguments:**

    - `precision`: the arithmetic of products, unless a product requests its own.
        `"highest"` multiplies in floating point, with exactly decoded weights. `"high"`
        keeps weights exact and at least 15 bits of activations. (For NF4 by bfloat16 on
        TPUs, see [`eqquant.kernels.TPUKernel`][].) `"default"` is the fastest.
    - `activations`: `"int8"` rounds each row of an activation (each token) to int8
        before a product, whatever the precision. The scale of a row is `absmax / 127`.
        With [`eqquant.Int8`][] this is W8A8. Gradients ignore the rounding. If `x @ w`
        contracts the axis of per-row scales, CPUs with AMX multiply `x` by the scales
        before they round it.
    - `tpu`: an [`eqquant.kernels.TPUKernel`][], which chooses the kernel and its tiles.
    - `gpu`: an [`eqquant.kernels.GPUKernel`][], which chooses the kernel.
    """

    precision: Precision = "high"
    activations: Activations = "float"
    tpu: TPUKernel | None = None
    gpu: GPUKernel | None = None

    def __post_init__(self):
        _check_fields(self)

    def __repr__(self):
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Compute({', '.join(shown)})"

    def updated(self, **fields: Any) -> "Compute":
        """Return a copy in which the fields that are not None are replaced."""
        given = {name: value for name, value in fields.items() if value is not None}
        return dataclasses.replace(self, **given)


def as_compute(
    compute: Compute | None, precision: str | None, activations: str | None
) -> Compute:
    """Return `compute`, or the default, with `precision` and `activations` replaced if
    they are given."""
    compute = Compute() if compute is None else compute
    return compute.updated(precision=precision, activations=activations)


def _check_fields(config: Any) -> None:
    """Check the values of all fields by their annotations."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not is_bearable(value, hint):
            error = ValueError if isinstance(value, str) else TypeError
            raise error(not_accepted(type(config).__name__, field.name, value, hint))
