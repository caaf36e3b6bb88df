"""Multiply quantized weights with the installed eqquant. An argument `native` requires
the native kernels."""

import sys

import eqquant
import jax
import numpy as np
from eqquant.kernels import cpu


print(sys.version.split()[0], eqquant.__file__)
print(eqquant.debug.environment())
status = cpu.status()
if sys.argv[1:] == ["native"] and "none" in status:
    sys.exit(status)
weight = jax.random.normal(jax.random.key(0), (256, 256))
x = jax.random.normal(jax.random.key(1), (4, 256))
for format in ("nf4", "int8", "int4", "fp8", "ternary"):
    q = eqquant.quantize(weight, format)
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    for rows in (1, 4):
        difference = np.asarray(x[:rows] @ q) - expected[:rows]
        error = np.linalg.norm(difference) / np.linalg.norm(expected[:rows])
        print(f"{format}, {rows} rows: relative error {error:.1e}")
        assert error < 1e-4  # Activations have at least 15 bits.
