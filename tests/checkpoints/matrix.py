"""The table of formats and libraries in docs/checkpoints.md.

    python tests/checkpoints/matrix.py > docs/tables/formats-by-library.md

Cells are found by trying: each format is written for each library and read back, and
the test files of the libraries are read. Formats of ModelOpt and Hugging Face are read
from files in their documented layouts. All cells are exact.
"""

import pathlib
import tempfile
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from eqquant import formats, FP8, MXFP4, NVFP4, quantize
from eqquant.checkpoints import (
    quantize_in_tiles,
    quantize_with_zero_points,
    read_checkpoint,
    write_gguf,
)
from eqquant.checkpoints._convert_to import LIBRARIES
from eqquant.checkpoints.files import ShardWriter, write_plain
from eqquant.checkpoints.writers import CompressedTensors, NotHeld, write_arrays


DATA = pathlib.Path(__file__).parent / "foreign/data"
FILES = {
    "compressed-tensors": ["compressed_tensors.safetensors"],
    "gptq": ["gptq_zeros", "gptq_symmetric"],
    "awq": ["gptq_awq"],
    "bitsandbytes": ["bitsandbytes_4bit.safetensors", "bitsandbytes_int8.safetensors"],
    "gguf": ["gguf.gguf"],
    "bitnet": ["bitnet_bitlinear"],
}
COLUMNS = {
    "compressed-tensors": "compressed-tensors",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "mlx": "MLX",
    "bitsandbytes": "bitsandbytes",
    "gguf": "GGUF",
    "bitnet": "BitNet",
    "modelopt": "ModelOpt",
    "hugging face": "Hugging Face",
}


def arrays():
    """Return an array for each row of the table."""
    weight = jax.random.normal(jax.random.key(0), (64, 256))
    integers: dict[Any, Any] = {8: eqquant.Int8, 6: formats.Int6, 5: formats.Int5}
    integers |= {4: eqquant.Int4, 3: eqquant.Int3, 2: eqquant.Int2}
    short = {"block_size": 64, "scale_dtype": "float16"}
    affine = {"block_size": 64, "scale_dtype": "bfloat16", "affine": True}
    for bits, format in integers.items():
        yield f"`Int{bits}`", quantize(weight, format(**short))
    for bits, format in integers.items():
        q = quantize(weight, format(**affine))
        yield f"`Int{bits}(affine=True)`, any offsets", q
        q = quantize_with_zero_points(weight, bits, block_size=64)
        yield f"`Int{bits}` with zero points", q
    for bits in (5, 4):
        format = integers[bits](32, "float16", affine=True, unsigned=True)
        yield f"`Int{bits}(affine=True, unsigned=True)`", quantize(weight, format)
    for bits, block in {6: 16, 5: 32, 4: 32, 3: 16, 2: 16}.items():
        is_affine = bits in (5, 4, 2)
        options = {"affine": is_affine, "unsigned": is_affine}
        format = integers[bits](block, double_quantization="k", **options)
        yield f'`Int{bits}` with `double_quantization="k"`', quantize(weight, format)
    yield "`NF4`", quantize(weight, "nf4")
    yield "`FP8`", quantize(weight, "fp8")
    yield "`FP8` in tiles of 128 x 128", quantize_in_tiles(weight)
    yield "`MXFP4`", quantize(weight, "mxfp4")
    nvfp4 = quantize(weight, "nvfp4", axis=(0, 1))
    yield "`NVFP4` with one factor", nvfp4
    units = lambda q: q.scales.units
    ones = jnp.ones_like(units(nvfp4))
    yield "`NVFP4` with the factor 1", eqx.tree_at(units, nvfp4, ones)
    yield "`Ternary`", quantize(weight, eqquant.Ternary(256, "float16"))
    yield "`DenseTernary`", quantize(weight, formats.DenseTernary())


def kind(q) -> tuple[str, bool]:
    return q.format.name, bool(q.format.has_offsets)


def kinds_read(library: str) -> set[tuple[str, bool]]:
    """Return the formats in test files of a library."""
    found = set()
    for name in FILES.get(library, []):
        arrays = read_checkpoint(DATA / name, decode=True).values()
        found |= {kind(q) for q in arrays if eqquant.is_quantized(q)}
    return found


def reads_layout(library: str, q) -> bool:
    """Return whether eqquant reads an array from a file in the documented layout of
    ModelOpt or Hugging Face, whose tensors are those of compressed-tensors, renamed."""
    layouts = {"modelopt": modelopt, "hugging face": hugging_face}
    if library not in layouts or not isinstance(q.format, FP8 | MXFP4 | NVFP4):
        return False
    parts = CompressedTensors().pack("weight", q).tensors
    tensors = layouts[library](q, parts)
    if tensors is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        write_plain(pathlib.Path(folder) / "model.safetensors", tensors, {})
        read: Any = read_checkpoint(folder)["weight"]
    assert eqquant.is_quantized(read)
    expected = q.T if read.shape != q.shape else q
    same = read.with_dtype("float32").dequantize() == expected.dequantize()
    assert same.all()
    return True


def modelopt(q, parts) -> dict | None:
    if not isinstance(q.format, NVFP4):
        return None
    factor = np.asarray(q.scales.units, np.float32).reshape(-1)[0]
    named = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    return named | {"weight_scale_2": factor}


def hugging_face(q, parts) -> dict | None:
    if isinstance(q.format, MXFP4):
        blocks = parts["weight_packed"].reshape(*parts["weight_scale"].shape, 16)
        return {"weight_blocks": blocks, "weight_scales": parts["weight_scale"]}
    if isinstance(q.format, FP8) and q.format.block_size:
        scales = parts["weight_scale"]
        return {"weight": parts["weight"], "weight_scale_inv": scales}
    return None


def writes(library: str, q) -> bool:
    """Return whether a library stores an array, and reads the same values back."""
    if library == "gguf":
        return writes_gguf(q)
    make = LIBRARIES.get(library)
    if make is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        try:
            with ShardWriter(path, None, {}) as writer:
                write_arrays(make(), writer, [("a.weight", q)], None, "matrix")
        except NotHeld:
            return False
        except ValueError as error:
            if isinstance(error.__cause__, NotHeld):
                return False
            raise
        read: Any = read_checkpoint(path)["a.weight"]
        same = read.with_dtype("float32").dequantize().astype(read.dtype)
        expected = q.with_dtype("float32").dequantize().astype(read.dtype)
        assert eqquant.is_quantized(read) and (same == expected).all()
    return True


def writes_gguf(q) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        try:
            write_gguf(path, {"a.weight": q})
        except ValueError:
            return False
        read: Any = read_checkpoint(path)["a.weight"]
    assert eqquant.is_quantized(read) and (read.dequantize() == q.dequantize()).all()
    return True


def table() -> str:
    rows = [["format", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    read = {library: kinds_read(library) for library in COLUMNS}
    for name, q in arrays():
        cells = []
        for library in COLUMNS:
            if writes(library, q):
                cells.append("reads, writes")
            else:
                is_general = kind(q)[1] and "zero points" not in name
                exact = kind(q) in read[library] and not (
                    is_general and library in ("compressed-tensors", "gptq", "awq")
                )
                exact = exact or reads_layout(library, q)
                cells.append("reads" if exact else "")
        rows.append([name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
