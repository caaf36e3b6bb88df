"""Write the layout of GPTQ, which GPTQModel, vLLM and transformers read."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jax import typed
from ...formats import Int2, Int3, Int4, Int8
from ..files import Path
from ..leaves import MAX_SHARD_SIZE
from ._library import as_matrix, layer_prefix, Library, no_layout, NotHeld, Packed
from ._pack import pack_bits
from ._write import write_model


class GPTQ(Library):
    """The layouts `gptq`, for symmetric weights, and `gptq_v2`, for others: `gptq`
    stores zero points minus one, and cannot store zero."""

    name = "GPTQ"

    def pack(self, name, q):
        prefix = layer_prefix(name, self.name)
        if type(q.format) not in (Int2, Int3, Int4, Int8):
            no_layout(q, self.name, "Int2, Int3, Int4 and Int8")
        matrix = as_matrix(q, self.name)
        bits = q.format.bits
        rows, columns = matrix.codes.shape
        if rows * bits % 32 or columns * bits % 32:
            raise NotHeld(
                f"has the shape {q.shape}; with {bits} bits, both axes must fill whole "
                f"words of 32 bits in {self.name}. Keep it in floats."
            )
        zeros = matrix.zero_points(2**bits)
        symmetric = zeros is None
        codes = matrix.codes
        if bits == 8:
            codes = (codes.astype(np.int16) + 128).astype(np.uint8)
        if zeros is None:
            zeros = np.full(matrix.scales.shape, 2 ** (bits - 1) - 1, np.uint8)
        scales = matrix.scales_in(np.float16, jnp.bfloat16)
        tensors = {
            "qweight": pack_bits(codes, bits).view(np.int32).T,
            "qzeros": pack_bits(np.ascontiguousarray(zeros.T), bits).view(np.int32),
            "scales": scales.T,
            "g_idx": (np.arange(columns) // matrix.block).astype(np.int32),
        }
        group = -1 if matrix.is_whole else matrix.block
        words = "per channel" if matrix.is_whole else f"by groups of {group}"
        words = f"int{bits} {words}{'' if symmetric else ', affine'}"
        named = {prefix + key: np.ascontiguousarray(x) for key, x in tensors.items()}
        return Packed(named, words, (bits, group, symmetric))

    def config(self, packed, plain):
        kinds = set(packed.values())
        if len(kinds) > 1:
            shown = ", ".join(map(str, sorted(kinds)))
            raise ValueError(
                "all weights of GPTQ have the same bits, group size and symmetry, got "
                f"{shown}. Quantize them alike, or use write_compressed_tensors."
            )
        if not kinds:
            return {}
        bits, group, symmetric = kinds.pop()
        layers = sorted(name.removesuffix(".weight") for name in plain)
        config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "desc_act": False,
            "checkpoint_format": "gptq" if symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "lm_head": "lm_head.weight" in packed,
            "dynamic": {f"-:^{re.escape(layer)}$": {} for layer in layers},
        }
        return {"quantization_config": config}


@typed
def write_gptq(
    folder: Path,
    model: Any,
    *,
    names: Callable[[str], Any] | None = None,
    source: Path | None = None,
    max_shard_size: int | None = MAX_SHARD_SIZE,
) -> None:
    """Write a quantized model in the layout of GPTQ, which GPTQModel, vLLM and
    transformers read. Codes and scales are not changed.

    !!! Example

        ```python
        import eqquant
        import jax
        import tempfile

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(
            weight, eqquant.Int4(block_size=128, scale_dtype="float16")
        )
        folder = tempfile.mkdtemp()
        eqquant.checkpoints.write_gptq(folder, {"head.weight": q})
        read = eqquant.checkpoints.read_checkpoint(folder)["head.weight"]
        assert (read.codes == q.codes).all()
        ```

    Weights are [`eqquant.Int2`][], [`eqquant.Int3`][], [`eqquant.Int4`][] or
    [`eqquant.Int8`][], all with the same bits and group size, symmetric or with zero
    points (see [`eqquant.checkpoints.quantize_with_zero_points`][]). Symmetric weights
    are written as `gptq`, and others as `gptq_v2`. Scales must be exact in float16 or
    bfloat16, which is the dtype to which the library decodes. Each weight is read back
    before it is written, and compared in this dtype.

    **Arguments:**

    As in [`eqquant.checkpoints.write_compressed_tensors`][].

    **Raises:**

    `ValueError` for an array that the library cannot store exactly, and for weights
    with different bits or group sizes.
    """
    write_model(GPTQ(), folder, model, names, source, max_shard_size, "write_gptq")
