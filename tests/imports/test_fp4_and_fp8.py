"""Read files with codes of ModelOpt (NVFP4) and Hugging Face (MXFP4 experts, FP8 in
tiles), and compare with their own decoders."""

from typing import Any

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints import read_checkpoint


torch: Any = pytest.importorskip("torch")
save_file: Any = pytest.importorskip("safetensors.torch").save_file


def weight(*shape, dtype="float32"):
    values = jax.random.normal(jax.random.key(0), shape)
    return torch.tensor(np.asarray(values)).to(getattr(torch, dtype))


def read(folder, name="a.weight", **tensors) -> Any:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return read_checkpoint(folder)[name]


def check(q, expected):
    """Compare values bit for bit, in the dtype of the decoder."""
    dtype = str(expected.dtype).removeprefix("torch.")
    values = q.with_dtype("float32").dequantize().astype(dtype)
    found = np.asarray(values.astype(jnp.float32))
    np.testing.assert_array_equal(found, expected.float().numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nvfp4_of_modelopt(dtype, tmp_path):
    module = "modelopt.torch.quantization.qtensor.nvfp4_tensor"
    NVFP4QTensor: Any = pytest.importorskip(module).NVFP4QTensor
    packed, scales, factor = NVFP4QTensor.quantize(weight(64, 256, dtype=dtype), 16)
    tensors = {"a.weight": packed._quantized_data, "a.weight_scale": scales}
    q = read(tmp_path, **tensors, **{"a.weight_scale_2": factor})
    assert q.format == eqquant.NVFP4()
    sizes = {"scale": scales, "double_scale": factor, "block_sizes": {-1: 16}}
    check(q, packed.dequantize(torch.float32, **sizes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_experts_of_transformers(dtype, tmp_path):
    mxfp4: Any = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    options = {"dtype": torch.uint8, "generator": generator}
    blocks = torch.randint(0, 256, (3, 64, 4, 16), **options)
    # The exponents of float32 that eqquant stores, and products stay normal.
    scales = torch.randint(2, 250, (3, 64, 4), **options)
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    q = read(tmp_path, "e.down_proj", **tensors)
    assert q.format == eqquant.MXFP4() and q.shape == (3, 128, 64)
    expected = mxfp4.convert_moe_packed_tensors(
        blocks, scales, dtype=getattr(torch, dtype)
    )
    check(q, expected)


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (384, 256)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_tiles_of_transformers(shape, dtype, tmp_path):
    """The layout of DeepSeek-V3, quantized and decoded by transformers."""
    fp8: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config: Any = pytest.importorskip("transformers").FineGrainedFP8Config()
    assert tuple(config.weight_block_size) == (128, 128)

    class Quantizer:
        quantization_config = config

    made = fp8.Fp8Quantize(Quantizer()).convert({"a.weight": weight(*shape)})
    made["a.weight_scale_inv"] = made["a.weight_scale_inv"].to(getattr(torch, dtype))
    parts = {"weight": made["a.weight"], "weight_scale_inv": made["a.weight_scale_inv"]}
    (expected,) = fp8.Fp8Dequantize(Quantizer()).convert(parts).values()
    q = read(tmp_path, **made)
    block = None if shape == (128, 128) else 128  # A single scale.
    assert q.format == eqquant.FP8(block_size=block) and q.dtype == dtype
    check(q, expected)
