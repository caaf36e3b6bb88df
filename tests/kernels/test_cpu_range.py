"""Products of very large and very small numbers.

`test_cpu.py` has products by each kernel.
"""

from typing import Any

import eqquant
import numpy as np
import pytest
from eqquant.kernels import cpu
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


# XLA rounds products of activations and row scales, whose units overflow here.
@pytest.mark.skipif("none" in cpu.status(), reason=f"NOT RUN: {cpu.status()}")
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
