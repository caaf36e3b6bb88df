"""Load checkpoints that other libraries quantized into models."""

import pathlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints.foreign._gguf import GGUFFile
from helpers import relative, TOLERANCE
from safetensors.numpy import load_file
from test_gguf import EXACT, write


DATA = pathlib.Path(__file__).parent / "data"
GGUF = DATA / "gguf.gguf"
EVERYTHING = "*"


def linear(rows, columns, **options):
    return eqx.filter_eval_shape(
        lambda: eqx.nn.Linear(columns, rows, key=jax.random.key(0), **options)
    )


def test_bitsandbytes_into_a_layer(normal):
    path = DATA / "bitsandbytes_4bit.safetensors"
    layer = eqquant.load_quantized(
        path, linear(24, 128), names=lambda p: f"nf4.{p}", ignore=EVERYTHING
    )
    found = eqquant.checkpoints.read_checkpoint(path, decode=True)
    assert eqx.tree_equal(layer.weight, found["nf4.weight"])
    x = normal(128)
    expected = found["nf4.weight"].dequantize() @ x + found["nf4.bias"]
    assert relative(layer(x), expected) < TOLERANCE["high"]


@pytest.mark.parametrize("name, format", [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_gguf_into_a_layer(name, format, normal):
    like = linear(2, 512, use_bias=False)
    load = lambda **options: eqquant.load_quantized(
        GGUF, like, names=lambda _: name, ignore=EVERYTHING, **options
    )
    layer = load()
    value = load_file(DATA / "gguf_expected.safetensors")[name]
    assert layer.weight.format.name == format
    assert np.asarray(layer.weight.dequantize()).tobytes() == value.tobytes()
    assert eqx.tree_equal(load(decode=True), layer)
    x = normal(512)
    assert relative(layer(x), value @ np.float64(x)) < TOLERANCE["high"]


@pytest.mark.parametrize("name", EXACT)
def test_stacks_are_filled_row_by_row(name, monkeypatch):
    whole = eqquant.checkpoints.read_checkpoint(GGUF, decode=True)[name]
    monkeypatch.setattr("eqquant.checkpoints.foreign._gguf_entries._part", 1)
    like = [jax.ShapeDtypeStruct((2, 3, *whole.shape), whole.dtype)]
    names = [[name] * 3] * 2
    (stack,) = eqquant.load_quantized(
        GGUF, like, names=lambda _: names, ignore=EVERYTHING
    )
    expected = jax.tree.map(lambda x: np.broadcast_to(x, (2, 3, *x.shape)), whole)
    assert stack.shape == like[0].shape and stack.format == EXACT[name]
    assert jax.tree.all(jax.tree.map(np.array_equal, stack, expected))


def test_decode_quantizes_inexact_weights_again(tmp_path):
    """Rows of 128 are in rows of 256, with a shape from ComfyUI."""
    like = linear(8, 128, use_bias=False)
    with GGUFFile(GGUF) as file:
        tensor = file.tensors["Q6_K"]
        stored = ("w", "Q6_K", tensor.shape, file.read(tensor))
    head = (5).to_bytes(4, "little") + (2).to_bytes(8, "little")
    shape = "comfy.gguf.orig_shape.w", 9, head + np.array([8, 128], "<i4").tobytes()
    path = write(tmp_path, [stored], [shape])
    options = dict(names=lambda _: "w")
    with pytest.raises(ValueError, match="at weight: .*'w' in Q6_K.*decode=True"):
        eqquant.load_quantized(path, like, "nf4", **options)
    value = load_file(DATA / "gguf_expected.safetensors")["Q6_K"].reshape(8, 128)
    layer = eqquant.load_quantized(path, like, "nf4", decode=True, **options)
    assert eqx.tree_equal(layer.weight, eqquant.quantize(jnp.asarray(value), "nf4"))
    layer = eqquant.load_quantized(path, like, None, decode=True, **options)
    assert np.asarray(layer.weight).tobytes() == value.tobytes()


class Stack(eqx.Module):
    weight: jax.Array


@pytest.mark.parametrize("shape", [(2, 2, 512)])
def test_stacks(shape):
    like = {"layers": Stack(jax.ShapeDtypeStruct(shape, jnp.float32))}
    load = lambda *names, **options: eqquant.load_quantized(
        GGUF, like, "nf4", rules={"layers.weight": "nf4"}, names=lambda _: list(names),
        ignore=EVERYTHING, **options,
    )["layers"].weight  # fmt: skip
    values = load_file(DATA / "gguf_expected.safetensors")
    uniform = load("IQ4_NL", "IQ4_NL")
    assert uniform.shape == shape and uniform.format.name == "codebook"
    np.testing.assert_array_equal(uniform.dequantize()[1], values["IQ4_NL"])
    # llama.cpp mixes types in a file.
    for names in (("Q8_0", "Q6_K"), ("Q4_0", "F32"), ("F32", "Q4_0")):
        with pytest.raises(ValueError, match="at layers.weight: "):
            load(*names)
        mixed = load(*names, decode=True)
        assert mixed.format == eqquant.NF4()
        stacked = jnp.stack([jnp.asarray(values[name]) for name in names])
        assert eqx.tree_equal(mixed, eqquant.quantize(stacked, "nf4"))


def test_quantize_checkpoint_quantizes_again(tmp_path):
    path = DATA / "bitsandbytes_int8.safetensors"
    out = tmp_path / "out.safetensors"
    with pytest.warns(UserWarning, match="already quantized, in LLM.int8"):
        eqquant.checkpoints.quantize_checkpoint(path, out, "nf4")
    decoded = eqquant.checkpoints.read_checkpoint(path)["int8.weight"].dequantize()
    got = eqquant.load(out)["int8"]["weight"]
    assert eqx.tree_equal(got, eqquant.quantize(decoded, "nf4"))
