"""`jax.tree.map` over several quantized models must not compute with their codes."""

import operator
from typing import Any

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_identical


FORMATS = ["nf4", "int8", "ternary", "binary", "fp8", "nvfp4"]
FORMATS += [eqquant.NF3(affine=True, double_quantization=True)]
ARITHMETIC = {
    "sum": operator.add,
    "difference": operator.sub,
    "moving average": lambda a, b: (0.9 * a + 0.1 * b).astype(a.dtype),
    "mean": lambda a, b: (0.5 * (a + b)).astype(a.dtype),
}
CHOICES = {
    "first": lambda a, b: a,
    "copy": lambda a, b: np.array(b),
    "by a mask": lambda a, b: jnp.where(jnp.arange(a.shape[-1]) % 2 == 0, a, b),
    "a permutation of rows": lambda a, b: jnp.concatenate([a, b])[::-1][: len(a)],
    "a stack": lambda a, b: jnp.stack([a, b]),
    "a norm": lambda a, b: jnp.linalg.norm((a - b).astype(float)),
}


@pytest.fixture(params=FORMATS, ids=str)
def models(request, normal) -> Any:
    """Two models of three arrays, of which two have the same shape."""
    shapes = (16, 64), (8, 64), (16, 64)
    make = lambda: [eqquant.quantize(normal(*s), request.param) for s in shapes]
    return make(), make()


@pytest.mark.parametrize("fn", ARITHMETIC.values(), ids=ARITHMETIC)
def test_arithmetic_raises(fn, models):
    with pytest.raises(TypeError, match="average_trees"):
        jax.tree.map(fn, *models)


def test_three_models(models):
    with pytest.raises(TypeError, match="average_trees"):
        jax.tree.map(lambda a, b, c: a + b - c, *models, models[0][::-1][:3])


@pytest.mark.parametrize("fn", CHOICES.values(), ids=CHOICES)
def test_choices_are_kept(fn, models):
    got = jax.tree.map(fn, *models)
    expected = [fn(*pair) for pair in zip(*map(jax.tree.leaves, models), strict=True)]
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        assert_identical(a, b)


def test_traced_codes_are_not_checked(models):
    """A limit that docs/when-training-fails.md states."""
    got = jax.jit(lambda *models: jax.tree.map(operator.add, *models))(*models)
    assert jax.tree.structure(got) == jax.tree.structure(models[0])
