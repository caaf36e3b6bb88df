"""Write `gguf.gguf` with the Python package of llama.cpp, and its decoded values.

    python tests/checkpoints/foreign/make_gguf.py FOLDER

Types that the package can quantize hold quantized numbers. Types that it can only
decode, such as K-quants, hold random bits.
"""

import pathlib
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file


ROWS, COLUMNS = 2, 512
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
# The positions of 16-bit numbers in a block, which must be finite.
RANDOM = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(rng: np.random.Generator, kind: Type, halves) -> np.ndarray:
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (ROWS, COLUMNS // block, nbytes), dtype=np.uint8)
    for start in halves:
        values = rng.integers(-99, 100, raw.shape[:2]) / 1024
        raw[..., start : start + 2] = values.astype("<f2")[..., None].view(np.uint8)
    return raw.reshape(ROWS, -1)


def write(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    # Exact in 16 bits, so that results do not depend on rounding.
    normal = np.round(rng.standard_normal((ROWS, COLUMNS)) * 64).astype(np.float32) / 64
    tensors: dict[str, tuple[np.ndarray, Type]] = {}
    for name in QUANTIZED:
        kind = Type[name]
        tensors[name] = gguf.quants.quantize(normal, kind), kind
    for name, halves in RANDOM.items():
        kind = Type[name]
        tensors[name] = random_blocks(rng, kind, halves), kind
    # A stack of experts, and rows of a single block.
    stack = rng.standard_normal((2, 3, 32)).astype(np.float32)
    tensors["stack"] = gguf.quants.quantize(stack, Type.Q4_0), Type.Q4_0
    tensors["F32"] = normal, Type.F32
    tensors["F16"] = normal.astype(np.float16), Type.F16
    tensors["BF16"] = gguf.quants.quantize(normal, Type.BF16), Type.BF16

    writer = gguf.GGUFWriter(folder / "gguf.gguf", "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_array("tokens", ["a", "b", "\N{GREEK SMALL LETTER ALPHA}"])
    writer.add_array("numbers", [1, -2, 3])
    expected = {}
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(expected, folder / "gguf_expected.safetensors")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
