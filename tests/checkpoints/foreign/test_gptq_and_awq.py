"""GPTQ and AWQ models that GPTQModel quantized. `make_gptq.py` writes the files."""

import pathlib

import eqquant
import numpy as np
import pytest
from eqquant import Int4
from safetensors.numpy import load_file


DATA = pathlib.Path(__file__).parent / "data"
FORMATS = {
    "zeros": Int4(block_size=32, affine=True),
    "symmetric": Int4(block_size=32),
    "awq": Int4(block_size=32, affine=True),
    "ordered": None,  # Ordered by activations.
}


def parts(name):
    folder = DATA / f"gptq_{name}"
    expected = load_file(folder / "expected.safetensors")
    weights = expected.keys() - {"tokens", "logits"}
    assert len(weights) == 4
    return folder / "model.safetensors", {key: expected[key] for key in weights}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_equal_the_library(name):
    path, expected = parts(name)
    if FORMATS[name] is None:
        with pytest.raises(ValueError, match="desc_act.*decode=True"):
            eqquant.checkpoints.read_checkpoint(path)
    found = eqquant.checkpoints.read_checkpoint(path, decode=FORMATS[name] is None)
    for key, value in expected.items():
        weight = found[key]
        if FORMATS[name] is None:
            assert not eqquant.is_quantized(weight)
        else:
            assert weight.format == FORMATS[name]
            weight = weight.dequantize()
        assert weight.dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(weight), value)
    # The file has no other tensors.
    assert {key.rsplit(".", 1)[-1] for key in found} == {"weight"}
