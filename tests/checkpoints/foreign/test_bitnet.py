"""Ternary weights as transformers packs them. `make_bitnet.py` writes the files."""

import json
import pathlib
import shutil

import eqquant
import numpy as np
import pytest
from eqquant import Ternary
from helpers import relative, TOLERANCE
from safetensors.numpy import load_file, save_file


DATA = pathlib.Path(__file__).parent / "data"
KINDS = ("bitlinear", "autobitlinear")


def read(folder, **options):
    return eqquant.checkpoints.read_checkpoint(folder / "model.safetensors", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_the_layers(kind, normal):
    folder = DATA / f"bitnet_{kind}"
    found = read(folder)
    expected = load_file(folder / "expected.safetensors")["layer.weight"]
    assert set(found) == {"layer.weight", "norm.weight"}
    q = found["layer.weight"]
    assert q.format == Ternary() and q.dtype == "bfloat16" and q.shape == (16, 24)
    value = np.asarray(q.astype("float32").dequantize())
    assert value.tobytes() == expected.tobytes()
    x = normal(3, 24)
    y = x @ q.astype("float32").T
    assert relative(y, np.float64(x) @ expected.T) < TOLERANCE["high"]


def test_the_scale_divides_or_multiplies():
    scales = [read(DATA / f"bitnet_{kind}")["layer.weight"].scales for kind in KINDS]
    assert (scales[0] == np.float32(1 / 1.25)).all() and (scales[1] == 1.25).all()


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(DATA / "bitnet_bitlinear", tmp_path / "model")


def test_invalid_config_json(folder):
    (folder / "expected.safetensors").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        eqquant.checkpoints.read_checkpoint(folder)
    for config, message in [
        ({}, "quantization_config must be an object with a quant_method"),
        ({"quantization_config": {"quant_method": "gptq"}}, "of 'bitnet', got 'gptq'"),
        (
            {"quantization_config": {"quant_method": "bitnet", "linear_class": "x"}},
            "'bitlinear', 'autobitlinear', got 'x'",
        ),
    ]:
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            eqquant.checkpoints.read_checkpoint(folder)
    # The default of transformers.
    config = {"quantization_config": {"quant_method": "bitnet"}}
    (folder / "config.json").write_text(json.dumps(config))
    scales = eqquant.checkpoints.read_checkpoint(folder)["layer.weight"].scales
    assert (scales == np.float32(0.8)).all()


@pytest.mark.parametrize(
    "packed, scale, message",
    [
        (
            np.full((4, 24), 0xFF, np.uint8),
            np.ones(1, np.float32),
            "'a.weight' .*codes of 3",
        ),
        (np.zeros((4, 24), np.uint8), np.zeros(1, np.float32), "'a.weight_scale'"),
        (
            np.zeros((4, 24), np.uint8),
            np.full(1, np.nan, np.float32),
            "'a.weight_scale'",
        ),
        (np.zeros((4, 24), np.uint8), np.ones((4, 2), np.float32), r"\(4, 2\)"),
        (np.zeros((4, 24), np.uint8), np.ones(1, np.int8), "int8"),
        (np.zeros(96, np.uint8), np.ones(1, np.float32), r"\(96,\)"),
    ],
)
def test_invalid_weights(packed, scale, message, folder):
    tensors = {"a.weight": packed, "a.weight_scale": scale}
    save_file(tensors, folder / "model.safetensors")
    for decode in (False, True):
        with pytest.raises(ValueError, match=message):
            read(folder, decode=decode)


def test_plain_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        "weight": np.arange(6, dtype=np.float16).reshape(2, 3),
        "bytes.weight": np.arange(6, dtype=np.uint8),
        "weight_scale": np.ones(3, np.float32),
        "steps": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }
    save_file(tensors, path)
    found = eqquant.checkpoints.read_checkpoint(path)
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)
        assert name == "steps" or found[name].dtype == array.dtype


def test_files_of_eqquant_are_rejected(tmp_path):
    path = tmp_path / "model.safetensors"
    eqquant.save(path, {"a": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"eqquant\.load"):
        eqquant.checkpoints.read_checkpoint(path)
