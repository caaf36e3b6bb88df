"""Write the layouts of MLX."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._jax import typed
from ...formats import Int2, Int3, Int4, Int5, Int6, Int8, MXFP4, NVFP4
from ..files import Path
from ..leaves import MAX_SHARD_SIZE
from ._library import (
    as_matrix,
    check_block,
    float8_scales,
    layer_prefix,
    Library,
    Matrix,
    no_layout,
    NotHeld,
    Packed,
    power_of_two_scales,
)
from ._pack import pack_bits
from ._write import write_model


_groups = (32, 64, 128)


class MLX(Library):
    """The layouts `affine`, `mxfp4` and `nvfp4` of MLX."""

    name = "MLX"

    def pack(self, name, q):
        prefix = layer_prefix(name, self.name)
        layout = {MXFP4: _mxfp4, NVFP4: _nvfp4}.get(type(q.format), _affine)
        if layout is _affine and type(q.format) not in _integers:
            no_layout(q, self.name, "Int2 to Int6, Int8, MXFP4 and NVFP4")
        matrix = as_matrix(q, self.name)
        codes = matrix.codes
        if q.format.bits == 8:
            codes = (codes.astype(np.int16) + 128).astype(np.uint8)
        if codes.shape[1] * q.format.bits % 32:
            raise NotHeld(
                f"has rows of {codes.shape[1]}, which do not fill whole words of 32 "
                "bits in MLX. Keep it in floats."
            )
        parts, mode = layout(matrix)
        parts = {"weight": pack_bits(codes, q.format.bits), **parts}
        settings = mode, q.format.bits, matrix.block
        words = mode if mode != "affine" else f"affine, {settings[1]} bits"
        tensors = {prefix + part: array for part, array in parts.items()}
        return Packed(tensors, f"{words}, groups of {matrix.block}", settings)

    def config(self, packed, plain):
        del plain
        if not packed:
            return {}
        kinds = list(packed.values())
        common = max(dict.fromkeys(kinds), key=kinds.count)
        others = {
            name.removesuffix("weight").removesuffix("."): _settings(kind)
            for name, kind in packed.items()
            if kind != common
        }
        config = _settings(common) | others
        return {"quantization": config, "quantization_config": config}


_integers = (Int2, Int3, Int4, Int5, Int6, Int8)


def _settings(kind: tuple[str, int, int]) -> dict[str, Any]:
    mode, bits, group = kind
    return {"group_size": group, "bits": bits, "mode": mode}


def _affine(matrix: Matrix) -> tuple[dict[str, np.ndarray], str]:
    """Return scales and biases: the bias is the value of the code 0."""
    if matrix.block not in _groups:
        raise NotHeld(
            f"has groups of {matrix.block}; MLX has groups of {_groups}. Quantize it "
            "with block_size=64."
        )
    format = matrix.q.format
    lowest = format.lowest_level
    if format.bits == 8 and not format.has_offsets:
        lowest = -128  # The lowest code of MLX, which such a weight does not have.
    biases = lowest * matrix.scales.astype(np.float64)
    if matrix.offsets is not None:
        biases += matrix.offsets
    for dtype in (matrix.q.dtype, np.dtype(np.float32)):
        parts = {"scales": matrix.scales.astype(dtype), "biases": biases.astype(dtype)}
        if np.array_equal(parts["scales"].astype(np.float64), matrix.scales) and (
            np.array_equal(parts["biases"].astype(np.float64), biases)
        ):
            return parts, "affine"
    raise NotHeld(
        "has offsets whose differences from the lowest level float32 would round. "
        "Quantize it with affine=False, or with scale_dtype='bfloat16'."
    )


def _mxfp4(matrix: Matrix) -> tuple[dict[str, np.ndarray], str]:
    check_block(matrix, 32)
    return {"scales": power_of_two_scales(matrix)}, "mxfp4"


def _nvfp4(matrix: Matrix) -> tuple[dict[str, np.ndarray], str]:
    check_block(matrix, 16)
    codes, unit = float8_scales(matrix)
    if unit != 1:
        raise NotHeld(
            f"has the factor {unit:.4g} beside its 8-bit scales, but NVFP4 of MLX has "
            "8-bit scales only. Quantize it to MXFP4, or to Int4 in groups of 32."
        )
    return {"scales": codes}, "nvfp4"


@typed
def write_mlx(
    folder: Path,
    model: Any,
    *,
    names: Callable[[str], Any] | None = None,
    source: Path | None = None,
    max_shard_size: int | None = MAX_SHARD_SIZE,
) -> None:
    """Write a quantized model for MLX. Codes and scales are not changed.

    !!! Example

        ```python
        import eqquant
        import jax
        import tempfile

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(
            weight, eqquant.Int4(block_size=64, scale_dtype="bfloat16")
        )
        folder = tempfile.mkdtemp()
        eqquant.checkpoints.write_mlx(folder, {"head.weight": q})
        read = eqquant.checkpoints.read_checkpoint(folder)["head.weight"]
        assert (read.codes == q.codes).all()
        ```

    - [`eqquant.Int2`][] to [`eqquant.Int8`][] in blocks of 32, 64 or 128, with or
        without offsets, become `affine`.
    - [`eqquant.MXFP4`][] becomes `mxfp4`.
    - [`eqquant.NVFP4`][] whose float32 factor is 1 becomes `nvfp4`.

    MLX stores `code * scale + bias`. A symmetric weight has the bias `-2 ** (bits - 1)
    * scale`. Layers may have different settings. Each weight is read back in float32
    before it is written, and compared in the dtype of its scales. `mx.dequantize` gives
    the same values in float32; with 16-bit scales, it rounds the product and the sum.

    **Arguments:**

    As in [`eqquant.checkpoints.write_compressed_tensors`][].

    **Raises:**

    `ValueError` for an array that the library cannot store exactly.
    """
    write_model(MLX(), folder, model, names, source, max_shard_size, "write_mlx")
