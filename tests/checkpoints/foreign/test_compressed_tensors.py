"""Weights of compressed-tensors, from `make_compressed_tensors.py`."""

import json
import pathlib

import eqquant
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import FP8, Int2, Int3, Int4, Int8, MXFP4, NVFP4
from eqquant.checkpoints.files import Source, write_plain
from eqquant.formats import Int5, Int6
from safetensors.numpy import load_file, save_file


DATA = pathlib.Path(__file__).parent / "data"
FULL = {"scale_dtype": "float32", "fit": "absmax"}
FORMATS = {
    "zeros": Int4(block_size=32, affine=True),
    "symmetric": Int4(block_size=32),
    "rows": Int4(block_size=None, affine=True),
    "two_bits": Int2(block_size=32, affine=True, **FULL),
    "eight_bits": Int8(block_size=None),
    "fp8_rows": FP8(),
    "fp8_whole": FP8(),
    "int8_rows": Int8(),
    "one_bit": Int2(block_size=32, **FULL),
    "three_bits": Int3(block_size=24, affine=True, **FULL),
    "five_bits": Int5(block_size=32),
    "six_bits": Int6(block_size=None, affine=True),
    "seven_bits": Int8(),
    "mxfp4": MXFP4(),
    "nvfp4": NVFP4(),
}


@pytest.fixture(scope="module")
def found():
    return eqquant.checkpoints.read_checkpoint(DATA / "compressed_tensors.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_values_equal_the_library(name, found):
    assert found.keys() == {f"{name}.weight" for name in FORMATS}
    q = found[f"{name}.weight"]
    # Compare in the dtype of the scales, to which the library rounds.
    expected = load_file(DATA / "compressed_tensors_expected.safetensors")
    expected = expected[f"{name}.weight"]
    assert q.format == FORMATS[name] and q.dtype == expected.dtype
    assert q.shape == expected.shape
    value = np.asarray(q.dequantize())
    np.testing.assert_array_equal(value, expected)


INVALID = {
    "no shape": (dict(weight_shape=None), "'weight_shape'"),
    "no scales": (dict(weight_scale=None), "'weight_scale'"),
    "another shape": (dict(weight_shape=np.array([8, 64])), r"\(8, 64\)"),
    "an empty shape": (dict(weight_shape=np.array([12, 0])), r"\(12, 0\)"),
    "a negative shape": (dict(weight_shape=np.array([12, -8])), r"\(12, -8\)"),
    "more columns": (dict(weight_shape=np.array([12, 97])), r"\(12, 97\)"),
    "three axes": (dict(weight_shape=np.array([12, 8, 8])), r"\(2,\), got .*\(3,\)"),
    "codes of bytes": (
        dict(weight_packed=np.zeros((12, 48), np.uint8)),
        r"'weight_scale' must be uint8 of the shape \(12, 3\)",
    ),
    "groups of no columns": (
        dict(weight_scale=np.ones((12, 0), np.float16)),
        " 0 groups",
    ),
    "partial groups": (dict(weight_scale=np.ones((12, 5), np.float16)), "5 groups"),
    "scales of a vector": (dict(weight_scale=np.ones(12, np.float16)), "weight_scale"),
    "zero points of the wrong shape": (
        dict(weight_zero_point=np.zeros((1, 3), np.int32)),
        r"\(2, 3\), got",
    ),
    "groups out of range": (
        dict(weight_g_idx=np.full(96, 3, np.int32)),
        "'weight_g_idx' .*3 to 3",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_parts(name, tmp_path):
    changes, message = INVALID[name]
    prefix = "zeros."
    # `load_file` cannot read the FP8 in this file.
    with Source(DATA / "compressed_tensors.safetensors") as source:
        names = [name for name in source.tensors if name.startswith(prefix)]
        tensors = {name: source.read(name) for name in names}
    tensors |= {prefix + name: tensor for name, tensor in changes.items()}
    tensors = {k: v for k, v in tensors.items() if v is not None}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    for decode in (False, True):
        with pytest.raises(ValueError, match=message):
            eqquant.checkpoints.read_checkpoint(path, decode=decode)


def float8(rows, columns):
    codes = np.random.default_rng(0).integers(0, 127, (rows, columns), np.uint8)
    return codes.view(jnp.float8_e4m3fn)


def save(path, **tensors):
    write_plain(path, {f"a.{name}": tensor for name, tensor in tensors.items()}, {})


def test_fp8_in_tiles(tmp_path):
    """Read the layout of Hugging Face and DeepSeek."""
    path, rows, columns = tmp_path / "model.safetensors", 130, 300
    weight = float8(rows, columns)
    scales = np.random.default_rng(1).uniform(0.1, 1, (2, 3)).astype(np.float32)
    save(path, weight=weight, weight_scale_inv=scales)
    q = eqquant.checkpoints.read_checkpoint(path)["a.weight"]
    assert q.format == FP8(block_size=128) and q.shape == (rows, columns)
    repeated = scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    expected = weight.astype(np.float32) * repeated
    assert np.asarray(q.dequantize()).tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [[128, 128], [96, 128], "x"])
@pytest.mark.parametrize("library", ["hugging face", "compressed-tensors"])
def test_fp8_in_other_tiles_is_an_error(library, size, tmp_path):
    """Two tiles of 96 rows have as many scales as two tiles of 128 rows."""
    path = tmp_path / "model.safetensors"
    save(path, weight=float8(192, 256), weight_scale_inv=np.ones((2, 2), np.float32))
    settings: dict = {"weight_block_size": size}
    if library == "compressed-tensors":
        settings = {"config_groups": {"g": {"weights": {"block_structure": size}}}}
    config = json.dumps({"quantization_config": settings})
    (tmp_path / "config.json").write_text(config)
    if size == [128, 128]:
        assert eqquant.is_quantized(
            eqquant.checkpoints.read_checkpoint(path)["a.weight"]
        )
        return
    with pytest.raises(ValueError, match="'a.weight'.*has tiles of.*128 x 128"):
        eqquant.checkpoints.read_checkpoint(path)


def test_inexact_bytes(tmp_path):
    path, scale = tmp_path / "model.safetensors", np.full((4, 1), 2, np.float32)
    integers = np.full((4, 8), -128, np.int8)
    nan = np.full((4, 8), 0x7F, np.uint8).view(jnp.float8_e4m3fn)
    for weight, message in ((integers, "from -128 to -128"), (nan, "NaN")):
        save(path, weight=weight, weight_scale=scale)
        with pytest.raises(ValueError, match=f"{message}.*decode=True"):
            eqquant.checkpoints.read_checkpoint(path)
        found = eqquant.checkpoints.read_checkpoint(path, decode=True)["a.weight"]
        np.testing.assert_array_equal(found, weight.astype(np.float32) * scale)


@pytest.mark.parametrize("shape", [(2,), (4, 2), (2, 1), (1, 4)])
def test_invalid_shapes_of_scales(shape, tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, weight=float8(4, 8), weight_scale=np.ones(shape, np.float32))
    with pytest.raises(ValueError, match=r"'weight_scale' .*\(\) or"):
        eqquant.checkpoints.read_checkpoint(path)
