"""Write NF4 weights in the layout of bitsandbytes."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._jax import typed
from ...arrays import QuantizedArray
from ...formats import float_scales, NF4, unpack
from ...trees import errors_at
from ..files import Path, to_json, write_plain
from ..foreign import BLOCK_SIZES, DTYPES, STATE
from ._library import Library, NotHeld, Packed


class BitsAndBytes(Library):
    """NF4 of bitsandbytes."""

    name = "bitsandbytes"

    def pack(self, name, q):
        tensors = {name + end: np.asarray(part) for end, part in _parts(q).items()}
        return Packed(tensors, f"NF4 in blocks of {_block(q)}")

    def config(self, packed, plain):
        if not packed:
            return {}
        kept = sorted(name.removesuffix(".weight") for name in plain)
        config = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "llm_int8_skip_modules": kept,
        }
        return {"quantization_config": config}


@typed
def write_bitsandbytes(
    path: Path, arrays: Mapping[str, Array | np.ndarray | QuantizedArray]
) -> None:
    """Write arrays to a safetensors file for bitsandbytes. NF4 weights keep their codes
    bit for bit.

    !!! Example

        ```python
        import eqquant
        import jax
        import tempfile

        weight = jax.random.normal(jax.random.key(0), (16, 128))
        path = f"{tempfile.mkdtemp()}/model.safetensors"
        q = eqquant.quantize(weight, "nf4")
        eqquant.checkpoints.write_bitsandbytes(path, {"layer.weight": q})
        read = eqquant.checkpoints.read_checkpoint(path)
        assert (read["layer.weight"].codes == q.codes).all()
        ```

    **Arguments:**

    - `path`: the file. An existing file is replaced.
    - `arrays`: arrays by name. Quantized arrays must be [`eqquant.NF4`][] along the
        last axis, with a block size of 32 to 4096 that divides the rows. Doubly
        quantized scales are written as float32, which changes no value.

    **Raises:**

    `ValueError` with the reason, for an array that bitsandbytes cannot represent.
    """
    target = pathlib.Path(os.fspath(path))
    tensors: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        parts = {name: array}
        if isinstance(array, QuantizedArray):
            with errors_at(f"write_bitsandbytes: {name!r}"):
                parts = BitsAndBytes().pack(name, array).tensors
        if duplicates := tensors.keys() & parts.keys():
            raise ValueError(
                f"write_bitsandbytes: arrays: {min(duplicates)!r} would name two "
                "tensors. Rename one of them."
            )
        tensors |= {key: np.asarray(part) for key, part in parts.items()}
    write_plain(target, tensors, {"format": "pt"})


def _parts(q: QuantizedArray) -> dict[str, Any]:
    """Return the tensors of a weight, by the suffixes of their names."""
    block = _block(q)
    codes = np.asarray(unpack(q.codes, q.format.bits, q.format.group)).reshape(-1)
    state = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": q.dtype.name,
        "shape": list(q.shape),
    }
    return {
        "": (codes[0::2] << np.uint8(4) | codes[1::2]).reshape(-1, 1),
        ".absmax": np.asarray(float_scales(q.scales), np.float32).reshape(-1),
        ".quant_map": np.array(NF4.table, np.float32),
        f"{STATE}nf4": np.frombuffer(to_json(state), np.uint8),
    }


def _block(q: QuantizedArray) -> int:
    """Return the block size of a weight. Raise [`NotHeld`][] if bitsandbytes cannot
    represent the weight."""

    def fail(problem: str):
        raise NotHeld(problem)

    q.check_whole()
    if type(q.format) is not NF4:
        fail(f"has the format {q.format!r}; bitsandbytes only has NF4.")
    if q.axes != (-1,):
        fail(
            f"has blocks along the axes {q.axes}; bitsandbytes only has blocks along "
            "the last axis. Transpose it, or quantize it again."
        )
    if q.ndim < 2 or not q.size:
        fail(f"has the shape {q.shape}; bitsandbytes needs a non-empty matrix.")
    columns = q.shape[-1]
    block = q.format.block_size or columns
    if block not in BLOCK_SIZES:
        fail(f"has a block size of {block}; bitsandbytes has {BLOCK_SIZES}.")
    if columns % block:
        fail(f"has rows of {columns}, which blocks of {block} do not divide.")
    if q.dtype.name not in DTYPES:
        fail(f"has the dtype {q.dtype.name}; bitsandbytes has {list(DTYPES)}.")
    scales = float_scales(q.scales)
    if not jnp.array_equal(scales, scales.astype(jnp.float32), equal_nan=True):
        fail("has scales that float32 cannot represent.")
    return block
