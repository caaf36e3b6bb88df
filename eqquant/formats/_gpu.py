"""What a user may choose of the kernels for GPUs."""

import dataclasses
from typing import get_args, Literal


_Kernel = Literal["mosaic", "triton", "xla"]


@dataclasses.dataclass(frozen=True)
class GPUKernel:
    """How products run on GPUs, in place of what eqquant chooses by chip and shape.

    It is part of a format, and so of the structure of a quantized array: JAX compiles
    again for another choice. On other platforms it has no effect.

    !!! Example

        ```python
        import eqquant
        import jax

        format = eqquant.NF4(gpu=eqquant.kernels.GPUKernel(kernel="xla"))
        w = eqquant.quantize(jax.random.normal(jax.random.key(0), (512, 512)), format)
        x = jax.numpy.ones((8, 512))
        print(eqquant.debug.explain(lambda x, w: x @ w.T, x, w, platform="gpu"))
        ```

    **Arguments:**

    - `kernel`: `"triton"`, the kernel that decodes and multiplies, for any number of
        rows; `"mosaic"`, that for many rows on an H100 or H200, which decodes behind
        tensor cores; each where there is one for the product, and otherwise what XLA
        makes; or `"xla"`, always that.
    - `check`: whether a kernel has to pass a check before its first product on a
        device: by the same product of XLA's, on small data. If it does not, eqquant
        warns, and XLA multiplies.
    """

    kernel: _Kernel | None = None
    check: bool = True

    def __post_init__(self):
        if self.kernel not in (None, *get_args(_Kernel)):
            raise ValueError(
                f"GPUKernel: kernel must be one of {get_args(_Kernel)} or None, got "
                f"{self.kernel!r}."
            )
        if not isinstance(self.check, bool):
            raise ValueError(f"GPUKernel: check must be a bool, got {self.check!r}.")
