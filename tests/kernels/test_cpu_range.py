"""Products of very large and very small numbers.

`test_cpu.py` has products by each kernel.
"""

from typing import Any

import eqquant
import jax
import numpy as np
import pytest
from eqquant.kernels import Matmul, xla
from helpers import relative


@pytest.mark.parametrize("contract_rows", [False, True])
@pytest.mark.parametrize("format", ["nf4", "int8", "ternary"])
def test_one_row(format, contract_rows, normal):
    q: Any = eqquant.quantize(normal(96, 512), format)
    row = normal(1, 96 if contract_rows else 512)
    for of_x, of_w in [(1, 1), (0, 1), (0, 1e-33), (1e-30, 1), (1, 1e33)]:
        x = np.float32(of_x) * row
        w = q.replace(scales=q.scales * np.float32(of_w))
        weight = np.asarray(w.dequantize(), np.float64)
        expected = np.asarray(x, np.float64) @ (weight if contract_rows else weight.T)
        got = x @ w if contract_rows else x @ w.T
        if of_x:
            assert relative(got, expected) < 1e-2
        else:
            assert (got == 0).all()


# Kernels decode E4M3 too small by 2**8.
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("contract_rows", [False, True])
def test_small_results_of_fp8(contract_rows, rows, normal):
    q: Any = eqquant.quantize(normal(96, 128), "fp8")
    x = normal(rows, 96 if contract_rows else 128)
    for of_x, of_w in [(3e-37, 1), (1e-18, 3e-19), (3e-17, 1e-20), (1e-4, 3e-33)]:
        of_x, of_w = map(np.float32, (of_x, of_w))
        w = q.replace(scales=q.scales * of_w)
        weight = np.asarray(q.dequantize(), np.float64) * of_w
        expected = np.asarray(x * of_x, np.float64) @ (
            weight if contract_rows else weight.T
        )
        got = x * of_x @ w if contract_rows else x * of_x @ w.T
        assert relative(got, expected) < 2e-2


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("contract_rows", [False, True])
@pytest.mark.parametrize("format", ["nf4", "int8", "ternary"])
def test_two_small_operands(format, contract_rows, rows, normal):
    q: Any = eqquant.quantize(normal(96, 128), format)
    x = normal(rows, 96 if contract_rows else 128) * np.float32(1e-18)
    w = q.replace(scales=q.scales * np.float32(1e-18))
    weight = np.asarray(w.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (weight if contract_rows else weight.T)
    # Terms of sums near 1e-36 may be subnormal, and lose 1e-38.
    assert relative(x @ w if contract_rows else x @ w.T, expected) < 1e-3


# Intermediate values must neither overflow nor underflow if the result does not.
MAGNITUDES = [(1e-18, 1e-18), (1e-34, 1e34), (1e33, 1e-33), (1, 1e33), (1e33, 1)]
# Decoded weights would be subnormal, and so would the scales of formats without blocks.
LEAST = [(1, 1e-37), (1e5, 1e-37)]
TINY = [(2e-37, 1e5), (2e-37, 1e35)]


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("precision", ["default", "high"])
@pytest.mark.parametrize("contract_rows", [False, True])
@pytest.mark.parametrize("format", ["nf4", "int8", "ternary"])
def test_without_native_kernels(format, contract_rows, precision, activations, normal):
    q: Any = eqquant.quantize(
        normal(96, 128), format, precision=precision, activations=activations
    )
    x = normal(16, 96 if contract_rows else 128)
    matmul = Matmul(q.format, contract_rows=contract_rows, compute=q.compute)
    x_int8, x_unit = xla.round_int8(x)

    @jax.jit
    def product(of_x, of_w):
        if activations == "int8":
            return xla.dot(x_int8, q.codes, q.scales * of_w, matmul, x_unit * of_x)
        return xla.dot(x * of_x, q.codes, q.scales * of_w, matmul)

    usual = np.asarray(product(1, 1), np.float64)
    rounds_nf4 = format == "nf4" and (precision, activations) == ("default", "float")
    for pair in MAGNITUDES + (LEAST if rounds_nf4 else []):
        of_x, of_w = map(np.float32, pair)
        # Terms of sums near 1e-36 may be subnormal, and lose 1e-38.
        assert relative(product(of_x, of_w), usual * np.float64(of_x) * of_w) < 1e-3
    for pair in TINY if activations == "float" else ():
        of_x, of_w = map(np.float32, pair)
        # A part of the activation is subnormal, and flushed to zero.
        assert relative(product(of_x, of_w), usual * np.float64(of_x) * of_w) < 2e-2
