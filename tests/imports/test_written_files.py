"""Read files that eqquant wrote with the libraries that they are for."""

import json

import eqquant
import jax
import numpy as np
import pytest
from eqquant.checkpoints import (
    quantize_in_tiles,
    quantize_with_zero_points,
    read_checkpoint,
    write_compressed_tensors,
    write_gptq,
)


torch = pytest.importorskip("torch")
compressors = pytest.importorskip("compressed_tensors.compressors")

ROWS, COLUMNS = 160, 256


def weight(dtype="float32"):
    return jax.random.normal(jax.random.key(0), (ROWS, COLUMNS)).astype(dtype)


def quantized(dtype):
    """Return an array for each layout."""
    to = lambda *args, **kwargs: eqquant.quantize(weight(dtype), *args, **kwargs)
    short, formats = {"scale_dtype": "bfloat16"}, eqquant.formats
    return {
        "w8a16": to(eqquant.Int8(**short)),
        "w8a8": to("int8", activations="int8"),
        "int8_groups": to(eqquant.Int8(block_size=64)),
        "int6": to(formats.Int6(block_size=64)),
        "int5": to(formats.Int5(block_size=32, **short)),
        "int4": to(eqquant.Int4(block_size=128, **short)),
        "int4_rows": to(eqquant.Int4(block_size=None)),
        "int3": to(eqquant.Int3(block_size=64)),
        "int2": to(eqquant.Int2(block_size=64)),
        "int4_affine": quantize_with_zero_points(weight(dtype), 4, block_size=128),
        "int8_affine": quantize_with_zero_points(weight(dtype), 8, block_size=128),
        "int3_affine": quantize_with_zero_points(weight(dtype), 3, block_size=32),
        "fp8_rows": to("fp8"),
        "fp8_tensor": to("fp8", axis=(0, 1)),
        "fp8_tiles": quantize_in_tiles(weight(dtype)),
        "mxfp4": to("mxfp4"),
        "nvfp4": to("nvfp4", axis=(0, 1)),
    }


def decoded(q, dtype):
    """Return the values of a quantized array, rounded once to a dtype."""
    return np.asarray(q.with_dtype("float32").dequantize().astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compressed_tensors_decompresses_the_same_bits(dtype, tmp_path):
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    arrays = quantized(dtype)
    model = {f"{name}.weight": q for name, q in arrays.items()}
    write_compressed_tensors(tmp_path, model | {"norm.weight": weight(dtype)[0]})
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    tensors = load_file(tmp_path / "model.safetensors")
    groups = QuantizationConfig.model_validate(config).config_groups
    seen = set()
    for scheme in groups.values():
        compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
        for name in scheme.targets:
            state = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            value = compressor.decompress(state, scheme)["weight"]
            short = str(value.dtype).removeprefix("torch.")
            expected = decoded(arrays[name], short)
            found = value.float().numpy()
            np.testing.assert_array_equal(found, expected.astype(np.float32), name)
            read = read_checkpoint(tmp_path)[f"{name}.weight"]
            np.testing.assert_array_equal(decoded(read, short), expected, name)
            seen.add(name)
    assert seen == arrays.keys()


@pytest.mark.parametrize("format", ["int4", "w8a8", "nvfp4"])
def test_transformers_loads_a_written_folder(format, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **sizes
    )
    torch.manual_seed(1)
    original = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    original.save_pretrained(tmp_path / "original")

    options = {
        "int4": {"format": eqquant.Int4(scale_dtype="bfloat16")},
        "w8a8": {"format": "int8", "activations": "int8"},
        "nvfp4": {"format": "nvfp4", "axis": (0, 1)},
    }[format]
    model = read_checkpoint(tmp_path / "original")
    for name, array in model.items():
        if "_proj" in name:
            model[name] = eqquant.quantize(array, **options)
    folder = tmp_path / "quantized"
    write_compressed_tensors(folder, model, source=tmp_path / "original")

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.utils.quantization_config.CompressedTensorsConfig(
            run_compressed=False
        ),
    )
    found = loaded.state_dict()
    for name, array in model.items():
        if eqquant.is_quantized(array):
            expected = decoded(array, "bfloat16").astype(np.float32)
            weights = found[name].to(torch.bfloat16).float().numpy()
            np.testing.assert_array_equal(weights, expected, name)
    tokens = torch.arange(12)[None]
    assert torch.isfinite(loaded(tokens).logits).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptqmodel_dequantizes_the_same_bits(bits, symmetric, tmp_path):
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
    from safetensors.torch import load_file

    formats = {2: eqquant.Int2, 3: eqquant.Int3, 4: eqquant.Int4, 8: eqquant.Int8}
    if symmetric:
        format = formats[bits](block_size=32, scale_dtype="float16")
        q = eqquant.quantize(weight("float16"), format)
    else:
        q = quantize_with_zero_points(weight(), bits, block_size=64)
    write_gptq(tmp_path, {"a.weight": q})
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["sym"] == symmetric and config["bits"] == bits
    names = "group_size", "sym", "desc_act"
    layer = TorchLinear(
        bits=bits,
        in_features=COLUMNS,
        out_features=ROWS,
        **{name: config[name] for name in names},
    )
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    layer.load_state_dict(parts)
    if config["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    layer.scales = layer.scales.to(parts["scales"].dtype)
    found = layer.dequantize_weight().T
    expected = decoded(q, str(found.dtype).removeprefix("torch."))
    np.testing.assert_array_equal(found.float().numpy(), expected.astype(np.float32))
