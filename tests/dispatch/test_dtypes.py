"""Dtypes of products: those of `lax`, for operands and results of any precision."""

import functools as ft
import itertools

import eqquant
import jax
import jax.numpy as jnp
import pytest
from helpers import relative, strict
from jax import lax


SIZES = jnp.array([2, 3, 1])
OVER_LAST = (((1,), (1,)), ((), ()))
# A function of the weight and the activation, their shapes, and the blocked axis.
PRODUCTS = {
    "left": (
        lambda w, x, **kwargs: lax.dot_general(w, x, OVER_LAST, **kwargs),
        (8, 64),
        (3, 64),
        1,
    ),
    "right": (
        lambda w, x, **kwargs: lax.dot_general(x, w, OVER_LAST, **kwargs),
        (8, 64),
        (3, 64),
        1,
    ),
    "convolution": (
        lambda w, x, **kwargs: lax.conv_general_dilated(x, w, (1,), "SAME", **kwargs),
        (8, 4, 3),
        (2, 4, 9),
        (1, 2),
    ),
    "ragged": (
        lambda w, x, **kwargs: lax.ragged_dot(x, w, SIZES, **kwargs),
        (3, 64, 8),
        (6, 64),
        1,
    ),
}


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_have_the_dtype_of_lax(name, wide, normal):
    fn, shape, x_shape, axis = PRODUCTS[name]
    q, x = eqquant.quantize(normal(*shape), "int8", axis=axis), normal(*x_shape)
    dtypes = ["float32", "float64"] if wide else ["float32", "bfloat16", "float16"]
    with jax.enable_x64(wide):
        for first, second, out in itertools.product(
            dtypes, dtypes, [None, *dtypes[:2]]
        ):
            product = ft.partial(fn, preferred_element_type=out)
            w = jax.ShapeDtypeStruct(shape, first)
            args = q.with_dtype(first), x.astype(second)
            try:
                expected = jax.eval_shape(product, w, args[1])
            except TypeError:
                with pytest.raises(TypeError):
                    jax.eval_shape(strict(product), *args)
            else:
                assert jax.eval_shape(strict(product), *args) == expected


@pytest.mark.parametrize("name", PRODUCTS)
def test_narrow_results(name, normal):
    """A result may have fewer bits than its operands, except in convolutions."""
    fn, shape, x_shape, axis = PRODUCTS[name]
    operands = jnp.bfloat16 if name == "convolution" else jnp.float32
    product = ft.partial(fn, preferred_element_type=jnp.float16)
    q = eqquant.quantize(normal(*shape, dtype=operands), "int8", axis=axis)
    x = normal(*x_shape, dtype=operands)
    expected = product(q.dequantize(), x)
    # Half of an ulp of bfloat16, 2^-9, in each program.
    assert relative(strict(product)(q, x), expected) < 2**-8
    slope = lambda fn: jax.grad(lambda x: jnp.sum(jnp.sin(fn(x))))(x)
    got = slope(lambda x: strict(product)(q, x))
    assert relative(got, slope(lambda x: product(q.dequantize(), x))) < 2**-6
