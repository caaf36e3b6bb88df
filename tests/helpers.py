"""What several tests measure."""

import importlib.util
import math
import re

import eqquant
import equinox as eqx
import jax
import numpy as np
import pytest


# Bounds on the relative error of a product, from what the recipes of `kernels/xla.py`
# promise on normal data, with room for the small shapes of tests: float32 rounding, 15
# bits of activations, 8 bits of both operands.
TOLERANCE = {"highest": 3e-6, "high": 1e-4, "default": 2.5e-2}


def relative(actual, expected) -> float:
    """Frobenius norm of the difference, relative to the expected."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (norm if norm else 1))


def dense(tree):
    """The same with every quantized array dequantized."""
    return eqquant.dequantize_tree(tree)


def assert_close(actual, expected, tolerance=TOLERANCE["high"]):
    """Leaf by leaf: shapes and dtypes the same, values up to the tolerance."""
    actual, expected = jax.tree.leaves(dense(actual)), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) <= tolerance


def assert_identical(actual, expected):
    """Bit by bit, dtypes and structure as well."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def quantize_weights(layer, format):
    """Every floating-point matrix of a layer, chosen by the tests themselves."""
    return jax.tree.map(
        lambda x: (
            eqquant.quantize(x, format) if eqx.is_inexact_array(x) and x.ndim > 1 else x
        ),
        layer,
    )


def sqnr(actual, expected) -> float:
    """Signal to quantization noise ratio, in decibels."""
    return -20 * math.log10(relative(actual, expected))


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="NOT COMPILED FOR TPU: libtpu is missing (pip install libtpu)",
)


def kernels_in(compiled) -> list[str]:
    """The names of the Pallas kernels that multiply, in order."""
    text = compiled.as_text()
    calls = re.findall(r"%(\S+?)(?:\.\d+)? = .*custom_call_target=\"tpu_custom", text)
    around = ("spread", "split_planes", "join_planes", "round_rows")
    return [call for call in calls if call not in around]
