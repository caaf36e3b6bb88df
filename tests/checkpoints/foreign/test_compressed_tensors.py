"""Weights that compressed-tensors packed: `make_compressed_tensors.py`."""

import pathlib

import eqquant
import numpy as np
import pytest
from eqquant import Int2, Int4, Int8
from safetensors.numpy import load_file, save_file


DATA = pathlib.Path(__file__).parent / "data"
FULL = {"scale_dtype": "float32", "fit": "absmax"}
FORMATS = {
    "zeros": Int4(block_size=32, affine=True),
    "symmetric": Int4(block_size=32),
    "rows": Int4(block_size=None, affine=True),
    "two_bits": Int2(block_size=32, affine=True, **FULL),
    "eight_bits": Int8(block_size=None),
}


@pytest.fixture(scope="module")
def found():
    return eqquant.read_checkpoint(DATA / "compressed_tensors.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_the_values_are_those_of_the_library(name, found):
    assert found.keys() == {f"{name}.weight" for name in FORMATS}
    q = found[f"{name}.weight"]
    # In the dtype of the scales, to which the library rounds, too.
    expected = load_file(DATA / "compressed_tensors_expected.safetensors")
    expected = expected[f"{name}.weight"]
    assert q.format == FORMATS[name] and q.dtype == expected.dtype
    assert q.shape == expected.shape
    value = np.asarray(q.dequantize())
    np.testing.assert_array_equal(value, expected)


BAD = {
    "no shape": (dict(weight_shape=None), "no 'weight_shape' beside it"),
    "no scales": (dict(weight_scale=None), "no 'weight_scale' beside it"),
    "another shape": (dict(weight_shape=np.array([8, 64])), r"says \(8, 64\)"),
    "an empty shape": (dict(weight_shape=np.array([12, 0])), r"says \(12, 0\)"),
    "a negative shape": (dict(weight_shape=np.array([12, -8])), r"says \(12, -8\)"),
    "more columns": (dict(weight_shape=np.array([12, 97])), "knows no packing"),
    "three axes": (dict(weight_shape=np.array([12, 8, 8])), r"\(2,\), but has"),
    "codes of bytes": (dict(weight_packed=np.zeros((12, 12), np.uint8)), "in int32"),
    "groups of no columns": (dict(weight_scale=np.ones((12, 0), np.float16)), "0 gr"),
    "partial groups": (dict(weight_scale=np.ones((12, 5), np.float16)), "5 groups"),
    "scales of a vector": (dict(weight_scale=np.ones(12, np.float16)), "weight_scale"),
    "zeros of others": (
        dict(weight_zero_point=np.zeros((1, 3), np.int32)),
        r"\(2, 3\), but has",
    ),
    "an order of others": (
        dict(weight_g_idx=np.full(96, 3, np.int32)),
        "groups in 'weight_g_idx' from 3 to 3, but there are 3",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_parts_that_do_not_fit(what, tmp_path):
    changes, message = BAD[what]
    tensors = load_file(DATA / "compressed_tensors.safetensors")
    prefix = "zeros."
    tensors = {k: v for k, v in tensors.items() if k.startswith(prefix)}
    tensors |= {prefix + name: tensor for name, tensor in changes.items()}
    tensors = {k: v for k, v in tensors.items() if v is not None}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    for decode in (False, True):
        with pytest.raises(ValueError, match=message):
            eqquant.read_checkpoint(path, decode=decode)
