"""The table of formats and libraries in docs/checkpoints.md.

    python tests/checkpoints/matrix.py > docs/tables/formats-by-library.md

Cells are found by trying: each format is written for each library and read back, and
the test files of the libraries are read. All cells are exact.
"""

import pathlib
import tempfile
from typing import Any

import eqquant
import jax
from eqquant import formats
from eqquant.checkpoints import (
    quantize_with_zero_points,
    read_checkpoint,
    write_gguf,
)
from eqquant.checkpoints._convert_to import LIBRARIES
from eqquant.checkpoints.files import ShardWriter
from eqquant.checkpoints.writers import NotHeld, write_arrays


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
}


def arrays():
    """Return an array for each row of the table."""
    weight = jax.random.normal(jax.random.key(0), (64, 256))
    integers: dict[Any, Any] = {8: eqquant.Int8, 6: formats.Int6, 5: formats.Int5}
    integers |= {4: eqquant.Int4, 3: eqquant.Int3, 2: eqquant.Int2}
    short = {"block_size": 64, "scale_dtype": "float16"}
    affine = {"block_size": 64, "scale_dtype": "bfloat16", "affine": True}
    for bits, format in integers.items():
        yield f"`Int{bits}`", eqquant.quantize(weight, format(**short))
    for bits, format in integers.items():
        if bits < 8:
            q = eqquant.quantize(weight, format(**affine))
            yield f"`Int{bits}(affine=True)`, any offsets", q
            q = quantize_with_zero_points(weight, bits, block_size=64)
            yield f"`Int{bits}` with zero points", q
    yield "`NF4`", eqquant.quantize(weight, "nf4")
    yield "`FP8`", eqquant.quantize(weight, "fp8")
    yield "`MXFP4`", eqquant.quantize(weight, "mxfp4")
    yield "`NVFP4` with one factor", eqquant.quantize(weight, "nvfp4", axis=(0, 1))
    yield "`Ternary`", eqquant.quantize(weight, eqquant.Ternary(256, "float16"))
    yield "`DenseTernary`", eqquant.quantize(weight, formats.DenseTernary())


def kind(q) -> tuple[str, bool]:
    return q.format.name, bool(q.format.has_offsets)


def kinds_read(library: str) -> set[tuple[str, bool]]:
    """Return the formats in test files of a library."""
    found = set()
    for name in FILES.get(library, []):
        arrays = read_checkpoint(DATA / name, decode=True).values()
        found |= {kind(q) for q in arrays if eqquant.is_quantized(q)}
    return found


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
                cells.append("reads" if exact else "")
        rows.append([name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
