"""Products of very large and very small numbers by one row, whose results are checked.

`test_cpu.py` has products by more rows, whose operands are checked.
"""

from typing import Any

import eqquant
import numpy as np
import pytest
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
