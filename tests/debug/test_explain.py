"""Tests of `explain`, in particular of the rounding of activations."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant.kernels.tpu import _chips
from helpers import pairs, relative


@pairs(
    "format, precision, rows",
    ["int8", "ternary", "nf4"],
    ["highest", "high", "default"],
    [1, 20, 200],
)
def test_products_without_rounded_activations_are_linear(
    format, precision, rows, normal
):
    q = eqquant.quantize(normal(64, 128), format)
    x, y = normal(rows, 128), normal(rows, 128)
    with jax.default_matmul_precision(precision):
        text = eqquant.debug.explain(lambda x: x @ q.T, x)
        nonlinearity = relative((x + y) @ q.T, x @ q.T + y @ q.T)
    assert text.count("(activations ") == 1
    if "(activations not rounded)" in text:
        assert nonlinearity < 1e-6
    elif "rounded to 8 bits" in text:
        assert 1e-3 < nonlinearity < 3e-2
    else:
        assert "rounded to 15 bits" in text or "rounded to 16 bits" in text
        assert 1e-6 < nonlinearity < 1e-4


FORMATS = {
    "int8": ("int8", "float"),
    "ternary": ("ternary", "float"),
    "nf4": ("nf4", "float"),
    "W8A8": ("int8", "int8"),
    "W4A8": ("nf4", "int8"),
}


def explain(normal, format, rows, precision, dtype, platform):
    format, activations = FORMATS[format]
    weight = normal(64, 128).astype(dtype)
    q = eqquant.quantize(weight, format, activations=activations)
    x = normal(rows, 128).astype(dtype)
    with jax.default_matmul_precision(precision):
        return eqquant.debug.explain(lambda x: x @ q.T, x, platform=platform)


@pytest.mark.parametrize(
    "format, rows, precision, dtype, recipe, bits",
    [
        ("int8", 5, "high", "float32", "split", 15),
        ("ternary", 5, "high", "float32", "split", 15),
        ("nf4", 5, "high", "float32", "float", None),
        ("int8", 5, "highest", "float32", "float", None),
        ("int8", 3000, "high", "float32", "float", None),
        ("nf4", 5, "default", "float32", "round", 8),
        ("nf4", 500, "default", "float32", "bfloat16", 8),
        ("nf4", 5, "high", "bfloat16", "bfloat16", None),
        ("W8A8", 5, "high", "float32", "int8", 8),
        ("W4A8", 5, "highest", "float32", "float", 8),
    ],
)
def test_xla(format, rows, precision, dtype, recipe, bits, normal):
    text = explain(normal, format, rows, precision, dtype, "other")
    rounding = f"rounded to {bits} bits" if bits else "not rounded"
    assert f"XLA, recipe {recipe!r} (activations {rounding})" in text


@pytest.mark.parametrize(
    "format, rows, precision, dtype, variant, bits",
    [
        ("int8", 5, "high", "float32", "decode", 15),
        ("nf4", 5, "high", "bfloat16", "decode, rounded table", 15),
        ("nf4", 5, "default", "float32", "decode, rounded", 8),
        ("nf4", 500, "high", "float32", "float32", None),
        ("int8", 5, "highest", "float32", "float32", None),
        ("int8", 500, "default", "float32", "bfloat16", 8),
        ("int8", 500, "high", "bfloat16", "bfloat16", None),
        ("W8A8", 500, "high", "float32", "int8", 8),
        ("W8A8", 5, "high", "float32", "decode", 8),
    ],
)
def test_tpu(format, rows, precision, dtype, variant, bits, monkeypatch, normal):
    monkeypatch.setattr(_chips, "device_kind", lambda: "TPU v5e")
    text = explain(normal, format, rows, precision, dtype, "tpu")
    rounding = f"rounded to {bits} bits" if bits else "not rounded"
    weights = ", weights as int8" if "decode" in variant else ""
    assert (
        f"Pallas kernel, variant {variant!r}{weights} (activations {rounding})" in text
    )


def test_tpu_with_float8_matrix_units(monkeypatch, normal):
    monkeypatch.setattr(_chips, "device_kind", lambda: "TPU7x")
    exact = explain(normal, "int8", 5, "high", "float32", "tpu")
    assert "'decode', weights as bfloat16 (activations rounded to 16 bits)" in exact
    narrow = explain(normal, "int8", 5, "high", "bfloat16", "tpu")
    assert "'decode', weights as bfloat16 (activations not rounded)" in narrow
    rounded = explain(normal, "int8", 5, "default", "float32", "tpu")
    expected = "'decode, rounded', weights as bfloat16 (activations rounded to 8 bits)"
    assert expected in rounded


@pytest.mark.parametrize(
    "chip, preset, expected",
    [
        ("TPU v5e", "int8", "Pallas kernel, in int8"),
        ("TPU7x", "int8", "XLA, in bfloat16, because the chip does not multiply int8"),
        ("TPU7x", "fp8", "XLA, in float8"),
        ("TPU v6e", "fp8", "XLA, in bfloat16, because the chip does not multiply"),
        ("TPU v6e", "mxfp8", "XLA, in bfloat16"),
    ],
)
def test_low_precision_names_the_numbers_that_a_chip_multiplies(
    chip, preset, expected, monkeypatch, normal
):
    monkeypatch.setattr(_chips, "device_kind", lambda: chip)
    linear = eqx.nn.Linear(128, 256, use_bias=False, key=jax.random.key(0))
    model = eqquant.training.low_precision(linear, preset)
    step = eqx.filter_grad(lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2))
    lines = eqquant.debug.explain(step, model, normal(384, 128), platform="tpu")
    assert lines.count("\n") == 1  # Forward, and for the weight.
    assert all(f": {expected}" in line for line in lines.splitlines())


def test_low_precision_on_cpus_and_without_a_gradient(normal):
    linear = eqx.nn.Linear(128, 256, use_bias=False, key=jax.random.key(0))
    model = eqquant.training.low_precision(linear, "fp8")
    line = eqquant.debug.explain(jax.vmap(model), normal(8, 128), platform="cpu")
    assert line.startswith("float8_e4m3fn[8,128] by float8_e4m3fn[256,128] gives")
    assert line.endswith("XLA, in float32, because CPUs multiply no such numbers")
