"""Policies of `jax.checkpoint`, which select the products that a gradient computes
again."""

import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import pytest
from helpers import equations_of, relative, strict
from jax import lax


policies = jax.checkpoint_policies

# The number of products in the gradient of a block of two. It is 6 if the gradient
# computes both again.
POLICIES = {
    "dots": (policies.dots_saveable, 4),
    "dots without batch": (policies.dots_with_no_batch_dims_saveable, 4),
    "everything": (policies.everything_saveable, 4),
    "the name": (policies.save_only_these_names("quantized_dot"), 4),
    "moved to the host": (
        policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        4,
    ),
    "one of two": (
        policies.save_from_both_policies(
            policies.save_only_these_names("other"), policies.dots_saveable
        ),
        4,
    ),
    "another name": (policies.save_only_these_names("other"), 6),
    "none": (None, 6),
}


def loss(policy, w, x):
    block = lambda x: jnp.sin(jnp.sin(x @ w) @ w)
    return jnp.sum(jax.checkpoint(block, policy=policy)(x))


def count(fn, *args):
    return len(list(equations_of(jax.make_jaxpr(fn)(*args), "quantized_dot")))


@pytest.mark.parametrize("name", POLICIES)
def test_policies_see_products(name, normal):
    policy, expected = POLICIES[name]
    # Quantized scales are several operands of the primitive.
    q = eqquant.quantize(normal(64, 64), eqquant.NF4(double_quantization=True))
    x = normal(4, 64)
    fn = ft.partial(loss, policy)
    assert count(jax.value_and_grad(fn, 1), q, x) == expected
    assert count(jax.value_and_grad(strict(fn), 1), q, x) == expected
    gradient = jax.jit(jax.value_and_grad(fn, 1))
    (value, slope), dense = gradient(q, x), gradient(q.dequantize(), x)
    assert relative(value, dense[0]) < 1e-4  # 15 bits of activations.
    assert relative(slope, dense[1]) < 1e-3


def test_products_inside_of_calls_and_loops(normal):
    q = eqquant.quantize(normal(3, 64, 64), "int8")
    step = jax.checkpoint(
        jax.jit(lambda x, w: (jnp.sin(x @ w), None)), policy=policies.dots_saveable
    )
    fn = lambda x: jnp.sum(lax.scan(step, x, q)[0])
    assert count(jax.grad(fn), normal(4, 64)) == 2


def test_batched_products(normal):
    """Some policies save only products without a batch axis."""
    q, x = eqquant.quantize(normal(3, 64, 64), "int8"), normal(3, 4, 64)
    policy = policies.dots_with_no_batch_dims_saveable
    fn = lambda x: loss(policy, q, x)
    assert count(jax.grad(fn), x) == 6


def test_adapters(normal):
    layer = eqquant.quantize_tree({"w": normal(64, 64)}, "int8")
    adapted = eqquant.lora_tree(layer, 4, key=jax.random.key(0))["w"]
    x = normal(4, 64)
    for policy, expected in ((policies.dots_saveable, 8), (None, 12)):
        fn = ft.partial(loss, policy, adapted)
        jaxpr = jax.make_jaxpr(jax.grad(fn))(x)
        assert len(list(equations_of(jaxpr, "rows_dot"))) == expected
