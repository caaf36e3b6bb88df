"""Compare files with MLX, whose CPU build runs on x86-64: `mx.dequantize` decodes what
`write_mlx` wrote, and `read_checkpoint` reads what `mx.quantize` made.

`mx.dequantize` rounds both the product and the sum to the dtype of the scales. eqquant
computes both in float32. So affine values are compared in float32.
"""

import json
from typing import Any

import eqquant
import jax
import numpy as np
import pytest
from eqquant.checkpoints import (
    quantize_with_zero_points,
    read_checkpoint,
    write_mlx,
)
from eqquant.formats import Int2, Int3, Int4, Int5, Int6, Int8


mx: Any = pytest.importorskip("mlx.core")

INTEGERS = {2: Int2, 3: Int3, 4: Int4, 5: Int5, 6: Int6, 8: Int8}
AFFINE = [(bits, group) for bits in INTEGERS for group in (32, 64, 128)]


def weight(dtype="float32"):
    return jax.random.normal(jax.random.key(0), (96, 256)).astype(dtype)


def arrays(bits, group):
    """Return a symmetric array, and arrays with offsets and zero points."""
    options = {"block_size": group, "scale_dtype": "bfloat16"}
    yield "symmetric", eqquant.quantize(weight("bfloat16"), INTEGERS[bits](**options))
    format = INTEGERS[bits](affine=True, **options)
    yield "affine", eqquant.quantize(weight("bfloat16"), format)
    q = quantize_with_zero_points(weight(), bits, block_size=group)
    yield "zero_points", q


def read(folder, **options) -> Any:
    return read_checkpoint(folder, **options)["a.weight"]


def in_float32(q):
    return np.asarray(q.with_dtype("float32").dequantize())


def decoded(tensors, name, settings):
    """Decode a written weight by MLX, in float32."""
    scales, biases = (tensors.get(f"{name}.{part}") for part in ("scales", "biases"))
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    value = mx.dequantize(tensors[f"{name}.weight"], scales, biases, **settings)
    return np.array(value.astype(mx.float32))


def settings_of(folder, name):
    config = json.loads((folder / "config.json").read_text())["quantization"]
    found = config | config.get(name, {})
    return {key: found[key] for key in ("group_size", "bits", "mode")}


@pytest.mark.parametrize("bits, group", AFFINE)
def test_mlx_decodes_written_integers(bits, group, tmp_path):
    model = dict(arrays(bits, group))
    write_mlx(tmp_path, {f"{name}.weight": q for name, q in model.items()})
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    for name, q in model.items():
        settings = settings_of(tmp_path, name)
        assert settings == {"group_size": group, "bits": bits, "mode": "affine"}
        values = decoded(tensors, name, settings)
        np.testing.assert_array_equal(values, in_float32(q), name)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_mlx_decodes_written_floats(mode, tmp_path):
    q = eqquant.quantize(weight(), "mxfp4")
    if mode == "nvfp4":
        # MLX has no factor beside the 8-bit scales: read its own array.
        q = read(made(tmp_path / "made", mode, 16, 4))
    write_mlx(tmp_path / "written", {"a.weight": q})
    tensors = mx.load(str(tmp_path / "written/model.safetensors"))
    settings = settings_of(tmp_path / "written", "a")
    assert settings["mode"] == mode
    np.testing.assert_array_equal(decoded(tensors, "a", settings), in_float32(q))


def made(folder, mode, group, bits, dtype="float32"):
    """Quantize by MLX, and write a folder like mlx-lm."""
    settings = {"group_size": group, "bits": bits, "mode": mode}
    w = mx.array(np.asarray(weight())).astype(getattr(mx, dtype))
    parts = mx.quantize(w, **settings)
    folder.mkdir()
    names = "a.weight", "a.scales", "a.biases"
    tensors = dict(zip(names, parts, strict=False))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = json.dumps({"quantization": settings})
    (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits, group", AFFINE)
def test_integers_of_mlx(bits, group, dtype, tmp_path):
    folder = made(tmp_path / "made", "affine", group, bits, dtype)
    tensors = mx.load(str(folder / "model.safetensors"))
    settings = settings_of(folder, "a")
    found = read(folder)
    assert found.format.bits == bits and found.format.block_size == group
    np.testing.assert_array_equal(in_float32(found), decoded(tensors, "a", settings))


@pytest.mark.parametrize("bits, group", AFFINE)
def test_float32_scales_of_mlx(bits, group, tmp_path):
    """MLX rounds `code * scale` before it adds the bias, and so does eqquant. The same
    codes, scales and biases are written again."""
    folder = made(tmp_path / "made", "affine", group, bits)
    tensors = mx.load(str(folder / "model.safetensors"))
    settings = settings_of(folder, "a")
    q = read(folder)
    assert q.format.unsigned and q.format.bits == bits
    values = decoded(tensors, "a", settings)
    np.testing.assert_array_equal(q.dequantize(), values)
    np.testing.assert_array_equal(jax.jit(eqquant.dequantize)(q), values)

    write_mlx(tmp_path / "again", {"a.weight": q})
    again = mx.load(str(tmp_path / "again/model.safetensors"))
    assert settings_of(tmp_path / "again", "a") == settings
    for name, tensor in tensors.items():
        assert mx.array_equal(tensor, again[name]).item(), name


@pytest.mark.parametrize("mode, group", [("mxfp4", 32), ("nvfp4", 16)])
def test_floats_of_mlx(mode, group, tmp_path):
    folder = made(tmp_path / "made", mode, group, 4)
    tensors = mx.load(str(folder / "model.safetensors"))
    expected = decoded(tensors, "a", settings_of(folder, "a"))
    found = read(folder)
    assert found.format.name == mode
    np.testing.assert_array_equal(in_float32(found), expected)
