"""What a user may choose of the kernels for TPUs."""

import dataclasses
from typing import get_args, Literal


_Kernel = Literal["decode", "general"]


@dataclasses.dataclass(frozen=True)
class TPUKernel:
    """How products run on TPUs, in place of what eqquant chooses by chip and shape.

    It is part of a format, and so of the structure of a quantized array: JAX compiles
    again for another choice. On other platforms it has no effect.

    !!! Example

        ```python
        import eqquant
        import jax

        format = eqquant.NF4(tpu=eqquant.kernels.TPUKernel(lookup=False))
        w = eqquant.quantize(jax.random.normal(jax.random.key(0), (512, 512)), format)
        x = jax.numpy.ones((8, 512))
        print(eqquant.debug.explain(lambda x, w: x @ w.T, x, w, platform="tpu"))
        ```

    **Arguments:**

    - `kernel`: `"decode"`, for few rows, where there is such a kernel for the product;
        or `"general"`.
    - `lookup`: whether the hardware looks codebooks up. Without it the general kernel
        decodes them by comparisons, which is slower.
    - `exact_table`: whether each entry of a codebook keeps 13 bits or more, rather than
        7. This takes a second lookup. By default tables are exact for products of
        float32, and with bfloat16 where it costs little; otherwise the relative error
        is 6e-3.
    - `tile_m`: the most rows of the activation in a tile (general kernel).
    - `tile_n`: the rows of the other axis of the result in a tile (both kernels).
    - `tile_k`: about how many elements of the contracted axis are in a tile (general
        kernel).

    Tiles get smaller where the shapes need it. The compiler refuses a tile that does
    not fit in the memory of a chip.
    """

    kernel: _Kernel | None = None
    lookup: bool = True
    exact_table: bool | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    tile_k: int | None = None

    def __post_init__(self):
        if self.kernel not in (None, *get_args(_Kernel)):
            raise ValueError(
                f"TPUKernel: kernel must be one of {get_args(_Kernel)} or None, got "
                f"{self.kernel!r}."
            )
        for name in ("tile_m", "tile_n", "tile_k"):
            size = getattr(self, name)
            if size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"TPUKernel: {name} must be a positive integer or None, got "
                    f"{size!r}."
                )
