"""The arguments of `quantized_dot`: their checks and their defaults."""

from typing import Any

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.primitives import quantized_dot


Q = eqquant.quantize(jax.random.normal(jax.random.key(0), (64, 64)), "nf4")
X = jax.random.normal(jax.random.key(1), (3, 64))


def test_an_operand_of_another_type():
    parts: Any = Q.scales, Q.scales
    with pytest.raises(TypeError, match="^quantized_dot: codes is .*, but must be"):
        quantized_dot(X, *parts, format=Q.format)


def test_offsets_of_another_shape(untyped):
    q = eqquant.quantize(jnp.ones((64, 64)), eqquant.Int4(affine=True))
    for offsets in (q.offsets[:, :1], jnp.tile(q.offsets, 2)):
        with pytest.raises(TypeError, match="offsets must have the shape"):
            quantized_dot(X, q.codes, q.scales, format=q.format, offsets=offsets)


def test_defaults():
    scales = jnp.asarray(Q.scales)
    out = quantized_dot(x=X, codes=Q.codes, scales=scales, format=Q.format)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, X @ Q.T)
    rows = quantized_dot(X, Q.codes, scales, format=Q.format, contract_rows=True)
    np.testing.assert_array_equal(rows, X @ Q)
