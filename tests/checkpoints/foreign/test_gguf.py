"""GGUF files from the package of llama.cpp. `make_gguf.py` writes the file."""

import pathlib
import sys
from typing import Any

import eqquant
import jax
import numpy as np
import pytest
from eqquant import Int2, Int3, Int4, Int8, MXFP4, Ternary
from eqquant.checkpoints.foreign._ggml import _iq4, TYPES
from eqquant.checkpoints.foreign._gguf import GGUFFile
from eqquant.formats import Codebook, DenseTernary, Int5, Int6
from eqquant.kernels.cpu import _choose
from helpers import relative, TOLERANCE, unpacked
from safetensors.numpy import load_file


DATA = pathlib.Path(__file__).parent / "data"
K: dict[str, Any] = {"double_quantization": "k"}
EXACT = {
    "Q4_0": Int4(block_size=32, scale_dtype="float16"),
    "Q4_1": Int4(32, "float16", affine=True, unsigned=True),
    "Q2_K": Int2(16, affine=True, unsigned=True, **K),
    "Q3_K": Int3(16, **K),
    "Q4_K": Int4(32, affine=True, unsigned=True, **K),
    "Q5_K": Int5(32, affine=True, unsigned=True, **K),
    "Q8_0": Int8(block_size=32, scale_dtype="float16"),
    "Q5_0": Int5(block_size=32, scale_dtype="float16"),
    "Q5_1": Int5(32, "float16", affine=True, unsigned=True),
    "Q6_K": Int6(16, **K),
    "IQ4_NL": Codebook(_iq4, block_size=32, scale_dtype="float16"),
    "IQ4_XS": Codebook(_iq4, block_size=32, **K),
    "MXFP4": MXFP4(),
    "TQ1_0": DenseTernary(),
    "TQ2_0": Ternary(block_size=256, scale_dtype="float16"),
    "stack": Int4(block_size=32, scale_dtype="float16"),
}
# Bits per weight: at most 0.125 more than in the file.
BITS = {
    **{"Q4_0": 4.5, "Q4_1": 5, "Q3_K": 3.5625, "Q8_0": 8.5, "Q5_0": 5.5, "Q5_1": 6},
    **{"Q2_K": 2.625, "Q4_K": 4.625, "Q5_K": 5.625},
    **{"Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25, "TQ1_0": 1.6875},
    **{"TQ2_0": 2.0625, "stack": 4.5},
}
PLAIN = ("F32", "F16", "BF16")


@pytest.fixture(scope="module")
def found():
    return eqquant.checkpoints.read_checkpoint(DATA / "gguf.gguf", decode=True)


@pytest.fixture(scope="module")
def expected():
    return load_file(DATA / "gguf_expected.safetensors")


def test_names_and_order(found, expected):
    assert found.keys() == expected.keys() == {*EXACT, *PLAIN}
    with GGUFFile(DATA / "gguf.gguf") as file:
        assert list(found) == list(file.tensors)


@pytest.mark.parametrize("name", EXACT)
def test_quantized_values_equal_llama_cpp(name, found, expected):
    q = found[name]
    assert q.format == EXACT[name] and q.dtype == np.float32
    value = np.asarray(q.dequantize())
    assert value.shape == expected[name].shape
    assert value.tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("name", PLAIN)
def test_decoded_values_equal_llama_cpp(name, found, expected):
    value = np.asarray(found[name])
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(name, "float32")
    assert value.dtype == dtype and value.shape == expected[name].shape
    assert value.astype(np.float32).tobytes() == expected[name].tobytes()


def test_codes_equal_the_file(found):
    with GGUFFile(DATA / "gguf.gguf") as file:
        raw = file.read(file.tensors["Q4_0"]).reshape(-1, 18)
        assert np.asarray(found["Q4_0"].codes).tobytes() == raw[:, 2:].tobytes()
        raw = file.read(file.tensors["Q8_0"]).reshape(-1, 34)
        assert np.asarray(found["Q8_0"].codes).tobytes() == raw[:, 2:].tobytes()
        assert np.asarray(found["Q8_0"].scales).tobytes() == raw[:, :2].tobytes()
    assert (found["Q4_0"].scales < 0).any() and (found["Q4_0"].scales > 0).any()


def test_bits_per_weight(found):
    assert {name: 8 * found[name].nbytes / found[name].size for name in EXACT} == BITS
    with GGUFFile(DATA / "gguf.gguf") as file:
        for name in EXACT:
            kind = file.tensors[name].type
            assert 0 <= BITS[name] - 8 * kind.nbytes / kind.block <= 0.15


@pytest.mark.parametrize("name", [name for name in EXACT if name != "stack"])
def test_products(name, found, expected, normal, monkeypatch):
    """In both directions, by the native kernels and by XLA."""
    q, dense = found[name], expected[name].astype(np.float64)
    x, y = normal(5, dense.shape[1]), normal(3, dense.shape[0])
    for kernels in ("native", "XLA"):
        if kernels == "XLA":
            monkeypatch.setattr(_choose, "load", lambda: "there are none in this test")
        forward, backward = jax.jit(lambda x, y, q: (x @ q.T, y @ q))(x, y, q)
        assert relative(forward, x @ dense.T) < TOLERANCE["high"]
        assert relative(backward, y @ dense) < TOLERANCE["high"]


def write(folder, tensors, metadata=(), version=3, alignment=32):
    """Write a GGUF file from its specification. Sizes and types may be invalid."""
    codes = {kind.name: code for code, kind in TYPES.items()}
    number = lambda value, size: int(value).to_bytes(size, "little")
    text = lambda s: number(len(s.encode()), 8) + s.encode()
    head = b"GGUF" + number(version, 4) + number(len(tensors), 8)
    head += number(len(metadata), 8)
    for key, kind, raw in metadata:
        head += text(key) + number(kind, 4) + raw
    data = b""
    for name, kind, shape, raw in tensors:
        head += text(name) + number(len(shape), 4)
        head += b"".join(number(size, 8) for size in shape[::-1])
        head += number(codes.get(kind, kind), 4) + number(len(data), 8)
        data += bytes(raw) + bytes(-len(raw) % alignment)
    path = folder / "made.gguf"
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def test_integers_out_of_range(tmp_path):
    block = np.zeros(34, np.uint8)
    block[:2] = np.array([1.0], "<f2").view(np.uint8)
    block[2:4] = 128, 3  # -128 and 3
    path = write(tmp_path, [("w", "Q8_0", (1, 32), block)])
    with pytest.raises(ValueError, match="-128 to 3.*-127 to 127"):
        eqquant.checkpoints.read_checkpoint(path)
    assert eqquant.checkpoints.read_checkpoint(path, decode=True)["w"][
        0, :2
    ].tolist() == [-128, 3]


def test_offsets_much_larger_than_scales(tmp_path):
    block = np.full(20, 0x21, np.uint8)
    scale, offset = 2.0**-12 + 2.0**-22, 8192.0
    block[:4] = np.array([scale, offset], "<f2").view(np.uint8)
    path = write(tmp_path, [("w", "Q4_1", (32,), block)])
    q: Any = eqquant.checkpoints.read_checkpoint(path)["w"]
    assert np.asarray(q.offsets).tobytes() == block[2:4].tobytes()
    expected = np.float32(offset) + np.float32(scale) * np.repeat([1, 2], 16)
    assert q.dequantize().tolist() == expected.astype(np.float32).tolist()


def test_invalid_ternary_codes(tmp_path):
    block = np.full(66, 0x55, np.uint8)  # Zeros.
    block[0] = 0x57  # The code 3 would decode to 2.
    path = write(tmp_path, [("w", "TQ2_0", (1, 256), block)])
    with pytest.raises(ValueError, match=" 0 to 2"):
        eqquant.checkpoints.read_checkpoint(path)


def test_subnormal_scales_of_mxfp4(tmp_path):
    block = np.full(17, 0x11, np.uint8)
    block[0] = 1  # Half of the smallest normal number.
    path = write(tmp_path, [("w", "MXFP4", (32,), block)])
    with pytest.raises(ValueError, match="subnormal"):
        eqquant.checkpoints.read_checkpoint(path)


GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4")


@pytest.mark.parametrize("name", GRIDS)
def test_types_without_a_format(name, tmp_path, monkeypatch):
    """The error names the tensor and the way out. tests/imports decodes them."""
    (kind,) = (kind for kind in TYPES.values() if kind.name == name)
    raw = np.zeros(kind.nbytes, np.uint8)
    path = write(tmp_path, [("w", name, (1, kind.block), raw)])
    described = eqquant.checkpoints.describe_checkpoint(path)
    assert not described.tensors["w"].is_exact
    with pytest.raises(ValueError, match=f"'w' in {name}: .* Pass decode=True to"):
        eqquant.checkpoints.read_checkpoint(path)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ValueError, match=f"'w' in {name}: .* `pip install gguf`"):
        eqquant.checkpoints.read_checkpoint(path, decode=True)


def test_64_bit_numbers(tmp_path):
    values = np.array([1, -5, 2**31 - 1], np.int64)
    path = write(tmp_path, [("i", "I64", (3,), values.view(np.uint8))])
    assert eqquant.checkpoints.read_checkpoint(path)["i"].tolist() == values.tolist()
    values[0] = 2**31
    path = write(tmp_path, [("i", "I64", (3,), values.view(np.uint8))])
    for decode in (False, True):
        with pytest.raises(ValueError, match="int64.*int32.*jax_enable_x64"):
            eqquant.checkpoints.read_checkpoint(path, decode=decode)
    floats = np.array([0.1])
    path = write(tmp_path, [("x", "F64", (1,), floats.view(np.uint8))])
    with pytest.raises(ValueError, match="float64.*float32.*jax_enable_x64"):
        eqquant.checkpoints.read_checkpoint(path)
    assert eqquant.checkpoints.read_checkpoint(path, decode=True)["x"][0] == np.float32(
        0.1
    )
    with jax.enable_x64(True):
        assert eqquant.checkpoints.read_checkpoint(path)["x"][0] == 0.1


def test_metadata():
    with GGUFFile(DATA / "gguf.gguf") as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["tokens"] == ["a", "b", "\N{GREEK SMALL LETTER ALPHA}"]
        assert file.metadata["a.bool"] is True and file.metadata["a.float"] == 0.5
        assert file.metadata["numbers"].tolist() == [1, -2, 3]


def test_codes_in_planar_order(found):
    # Codes are planar within a block, as in every format of eqquant.
    assert unpacked(found["Q4_0"]).shape == found["Q4_0"].shape


def test_shapes_of_comfyui(tmp_path):
    """Rows of 320 are no multiple of 256, so the file has rows of 256."""
    sizes = lambda *shape: (
        (5).to_bytes(4, "little")
        + len(shape).to_bytes(8, "little")
        + np.array(shape, "<i4").tobytes()
    )
    with GGUFFile(DATA / "gguf.gguf") as file:
        tensors = [
            (name, name, shape, file.read(file.tensors[name]))
            for name, shape in (("Q4_0", (2, 512)), ("Q6_K", (4, 256)))
        ]
    shapes = {"Q4_0": (8, 2, 64), "Q6_K": (8, 128)}
    metadata = [
        (f"comfy.gguf.orig_shape.{name}", 9, sizes(*shape))
        for name, shape in shapes.items()
    ]
    path = write(tmp_path, tensors, metadata)
    plain = write(tmp_path / "..", tensors)
    with pytest.raises(
        ValueError, match="Q6_K.* blocks of 256, which cross its rows of 128"
    ):
        eqquant.checkpoints.read_checkpoint(path)
    got = eqquant.checkpoints.read_checkpoint(path, decode=True)
    expected = eqquant.checkpoints.read_checkpoint(plain, decode=True)
    assert eqquant.is_quantized(got["Q4_0"]) and not eqquant.is_quantized(got["Q6_K"])
    for name, shape in shapes.items():
        assert got[name].shape == shape
        value, whole = (
            np.asarray(x.dequantize() if eqquant.is_quantized(x) else x)
            for x in (got[name], expected[name])
        )
        assert value.tobytes() == whole.tobytes()
    described = eqquant.checkpoints.describe_checkpoint(path)
    assert [described.tensors[name].is_exact for name in shapes] == [True, False]
    assert "decoded to floats, with decode=True" in str(described)


def test_tensors_without_elements_raise_only_when_used(tmp_path):
    block = np.ones(4, np.float32).tobytes()
    path = write(
        tmp_path, [("empty", "F32", (0, 4), b""), ("full", "F32", (4,), block)]
    )
    assert eqquant.checkpoints.describe_checkpoint(path).tensors["empty"].size == 0
    like = {"full": jax.ShapeDtypeStruct((4,), np.float32)}
    found: Any = eqquant.load_quantized(path, like, None, ignore="empty")
    assert found["full"].tolist() == [1] * 4
    with pytest.raises(ValueError, match="'empty' has the shape .*no elements"):
        eqquant.checkpoints.read_checkpoint(path)
