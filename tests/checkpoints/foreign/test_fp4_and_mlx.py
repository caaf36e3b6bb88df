"""4-bit floats of ModelOpt and Hugging Face, and the layouts of MLX.

Decoders of the documented layouts stand in for the libraries, which `make test-imports`
installs. ModelOpt multiplies codes, 8-bit scales and a factor. MLX computes `code *
scale + bias`, and rounds the product and the sum in 16 bits.
"""

import json

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int4, Int8, MXFP4, NVFP4
from eqquant.checkpoints import read_checkpoint, write_mlx
from eqquant.checkpoints.files import TensorFile, write_plain
from helpers import assert_identical


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
RNG = np.random.default_rng(0)


def save(folder, config=None, **tensors):
    folder.mkdir(exist_ok=True)
    write_plain(folder / "model.safetensors", tensors, {})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_bytes(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


def levels(packed):
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes]


def modelopt(scale_2=0.0123, **changes):
    codes = RNG.integers(1, 127, (8, 4), np.uint8)
    return {
        "weight": random_bytes(8, 32),
        "weight_scale": codes.view(jnp.float8_e4m3fn),
        "weight_scale_2": np.array(scale_2, np.float32),
        "input_scale": np.array(1, np.float32),
    } | changes


def test_nvfp4_of_modelopt(tmp_path):
    parts = modelopt()
    save(tmp_path, **{f"a.{name}": part for name, part in parts.items()})
    found = read_checkpoint(tmp_path)
    q = found["a.weight"]
    assert q.format == NVFP4() and found.keys() == {"a.weight", "a.input_scale"}
    # float32, in the order of ModelOpt: scales first.
    scales = parts["weight_scale"].astype(np.float32) * parts["weight_scale_2"]
    expected = levels(parts["weight"]).astype(np.float32) * scales.repeat(16, 1)
    np.testing.assert_array_equal(q.dequantize(), expected)


def test_experts_in_mxfp4(tmp_path):
    blocks = random_bytes(2, 8, 3, 16)
    scales = RNG.integers(100, 130, (2, 8, 3), np.uint8)
    save(tmp_path, **{"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales})
    q = read_checkpoint(tmp_path)["e.gate_up_proj"]
    assert q.format == MXFP4() and q.shape == (2, 96, 8) and q.dtype == jnp.bfloat16
    factors = 2.0 ** (scales.astype(int) - 127)
    expected = (levels(blocks) * factors[..., None]).reshape(2, 8, 96).swapaxes(1, 2)
    np.testing.assert_array_equal(np.float64(q.dequantize()), expected)


@pytest.mark.parametrize("exponent, message", [(255, "infinite"), (0, "flushes to 0")])
def test_scales_outside_of_float32_are_not_exact(exponent, message, tmp_path):
    scales = np.full((8, 1), exponent, np.uint8)
    save(tmp_path, x_blocks=random_bytes(8, 1, 16) | 0x11, x_scales=scales)
    with pytest.raises(ValueError, match=f"'x' of MXFP4.*{message}.*decode=True"):
        read_checkpoint(tmp_path)
    assert read_checkpoint(tmp_path, decode=True)["x"].dtype == jnp.bfloat16


INVALID = {
    "rows": (modelopt(weight=random_bytes(8, 12)), "rows of 24"),
    "scales": (modelopt(weight_scale=np.ones((8, 4), np.float32)), "'weight_scale'"),
    "factors": (modelopt(weight_scale_2=np.ones(2, np.float32)), "'weight_scale_2'"),
    "infinite": (modelopt(weight_scale_2=np.float32([np.inf])), "not finite"),
    "negative": (modelopt(weight_scale_2=np.float32([-1])), "negative"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_nvfp4(case, tmp_path):
    parts, message = INVALID[case]
    save(tmp_path, **{f"a.{name}": part for name, part in parts.items()})
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path)


def test_experts_of_another_block_size_are_rejected(tmp_path):
    save(tmp_path, x_blocks=random_bytes(8, 2, 8), x_scales=random_bytes(8, 2))
    with pytest.raises(ValueError, match="last axis of 16 bytes"):
        read_checkpoint(tmp_path)


#
# MLX
#


def mlx(dtype="float16", **changes):
    scales = (RNG.integers(1, 100, (4, 2)) / 512).astype(dtype)
    biases = (RNG.integers(-100, 100, (4, 2)) / 64).astype(dtype)
    weight = random_bytes(4, 32).view(np.uint32)
    return {"weight": weight, "scales": scales, "biases": biases} | changes


AFFINE = {"group_size": 32, "bits": 4}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_affine_of_mlx(dtype, tmp_path):
    parts = mlx(jnp.dtype(dtype))
    named = {f"a.{name}": part for name, part in parts.items()}
    save(tmp_path, {"quantization": AFFINE}, **named)
    q = read_checkpoint(tmp_path)["a.weight"]
    format = Int4(block_size=32, scale_dtype=dtype, affine=True, unsigned=True)
    assert q.format == format and q.dtype == dtype
    np.testing.assert_array_equal(q.offsets, parts["biases"])
    packed = parts["weight"].view(np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(4, 64)
    scales, biases = (np.float32(parts[n]).repeat(32, 1) for n in ("scales", "biases"))
    expected = (codes * scales + biases).astype(parts["scales"].dtype)
    np.testing.assert_array_equal(q.dequantize(), expected)


@pytest.mark.slow
def test_scales_of_mlx_with_all_digits(tmp_path):
    """Products with codes are rounded, and then the sums. Writing the weight gives the
    same tensors."""
    numbers = [RNG.standard_normal((4, 2)).astype(np.float32) for _ in range(2)]
    for bits in (2, 3, 4, 5, 6, 8):
        weight = random_bytes(4, 64 * bits // 8).view(np.uint32)
        named = {"a.weight": weight, "a.scales": numbers[0], "a.biases": numbers[1]}
        settings = AFFINE | {"bits": bits}
        save(tmp_path / "made", {"quantization": settings}, **named)
        q = read_checkpoint(tmp_path / "made")["a.weight"]
        digits = np.unpackbits(weight.view(np.uint8), bitorder="little")
        codes = digits.reshape(4, 64, bits) @ (1 << np.arange(bits))
        scales, biases = (x.repeat(32, 1) for x in numbers)
        expected = np.float32(codes) * scales + biases
        np.testing.assert_array_equal(q.dequantize(), expected)
        np.testing.assert_array_equal(jax.jit(eqquant.dequantize)(q), expected)
        write_mlx(tmp_path / "again", {"a.weight": q})
        with TensorFile(tmp_path / "again/model.safetensors") as again:
            assert_identical({name: again.read(name) for name in named}, named)


def test_layers_of_mlx_with_their_own_settings(tmp_path):
    first = {f"a.{name}": part for name, part in mlx().items()}
    scales = RNG.integers(100, 127, (4, 2), np.uint8)
    second = {"b.weight": first["a.weight"], "b.scales": scales}
    third = {"c.weight": first["a.weight"], "c.scales": scales.repeat(2, 1)}
    config = AFFINE | {
        "b": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "c": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    }
    save(tmp_path, {"quantization": config}, **first, **second, **third)
    found = read_checkpoint(tmp_path)
    values = levels(first["a.weight"].view(np.uint8))
    exponents = 2.0 ** (scales.astype(int) - 127)
    expected = values * exponents.repeat(32, 1)
    np.testing.assert_array_equal(np.float64(found["b.weight"].dequantize()), expected)
    eighths = third["c.scales"].view(jnp.float8_e4m3fn).astype(float).repeat(16, 1)
    np.testing.assert_array_equal(found["c.weight"].dequantize(), values * eighths)


INVALID_MLX = {
    "no config": (None, {}, "no config.json with 'quantization'"),
    "bits": (AFFINE | {"bits": 7}, {}, "has 7 bits"),
    "no bits": ({"group_size": 32}, {}, "has 0 bits"),
    "group": (AFFINE | {"group_size": 48}, {}, "group size 48"),
    "mode": (AFFINE | {"mode": "ternary"}, {}, "mode 'ternary'"),
    "list": (AFFINE | {"mode": ["affine"]}, {}, "mode .'affine'."),
    "scales": (AFFINE, {"scales": np.ones((4, 3), np.float16)}, "'scales' must be"),
    "biases": (AFFINE, {"biases": np.ones((4, 2), np.float32)}, "'biases' must be"),
}


@pytest.mark.parametrize("case", INVALID_MLX)
def test_invalid_mlx(case, tmp_path):
    config, changes, message = INVALID_MLX[case]
    parts = {f"a.{name}": part for name, part in mlx(**changes).items()}
    save(tmp_path, config and {"quantization": config}, **parts)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path)


def test_8_bits_with_biases(tmp_path):
    parts = mlx(weight=random_bytes(4, 64).view(np.uint32))
    parts = {f"a.{name}": part for name, part in parts.items()}
    save(tmp_path, {"quantization": AFFINE | {"bits": 8}}, **parts)
    found = read_checkpoint(tmp_path)["a.weight"]
    assert found.format == Int8(32, "float16", affine=True, unsigned=True)
    codes = parts["a.weight"].view(np.uint8)
    scales, biases = (
        np.float32(parts[f"a.{name}"]).repeat(32, 1) for name in ("scales", "biases")
    )
    values = found.with_dtype("float32").dequantize()
    np.testing.assert_array_equal(values, codes * scales + biases)
    # The writer gives back the same files.
    write_mlx(tmp_path / "again", {"a.weight": found}, names=lambda path: "a.weight")
    again = read_checkpoint(tmp_path / "again")["a.weight"]
    assert_identical(again, found)
