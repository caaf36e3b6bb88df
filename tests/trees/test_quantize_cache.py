"""Caches of keys and values, rotated or not."""

from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.arrays import RotatedArray
from jax import lax


HEADS, TOKENS, SIZE = 3, 24, 64


def relative_error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def tokens():
    """Keys with two large channels, as in language models, and values."""
    k, v, q = jax.random.normal(jax.random.key(0), (3, TOKENS, HEADS, SIZE))
    return k.at[..., :2].mul(20), v, q


def attend(cache, i, key, value, query):
    """Append a token to keys (columns) and values (rows), and attend to all tokens."""
    keys = lax.dynamic_update_slice(cache["k"], key[..., None], (0, 0, i))
    values = lax.dynamic_update_slice(cache["v"], value[:, None], (0, i, 0))
    scores = jnp.einsum("hd,hdt->ht", query / SIZE, keys)
    weights = jax.nn.softmax(jnp.where(jnp.arange(TOKENS) <= i, scores, -jnp.inf))
    return {"k": keys, "v": values}, jnp.einsum("ht,htd->hd", weights, values)


def decode(cache):
    """Run all tokens in a scan, without decoding the cache."""

    def run(cache, k, v, q):
        step = lambda cache, x: attend(cache, *x)
        return lax.scan(step, cache, (jnp.arange(TOKENS), k, v, q))

    return jax.jit(eqquant.quaxify(run, on_materialise="error"))(cache, *tokens())


def empty(dtype="float32"):
    shapes = {"k": (HEADS, SIZE, TOKENS), "v": (HEADS, TOKENS, SIZE)}
    return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}


AXES = {"k": -2, "v": -1}


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "nf4"])
def test_tokens_are_appended_without_decoding(format, rotate):
    cache = eqquant.trees.quantize_cache(empty(), format, axis=AXES, rotate=rotate)
    end, out = decode(cache)
    assert jax.tree.structure(end) == jax.tree.structure(cache)
    k, v, _ = tokens()
    # The same as quantizing all tokens at once, which rounds float sums differently.
    whole = {"k": jnp.moveaxis(k, 0, -1), "v": jnp.moveaxis(v, 0, 1)}
    whole = eqquant.trees.quantize_cache(whole, format, axis=AXES, rotate=rotate)
    for name in AXES:
        assert type(end[name]) is (RotatedArray if rotate else eqquant.QuantizedArray)
        found, expected = end[name].dequantize(), whole[name].dequantize()
        # A sum on the border of two codes may round to either.
        assert relative_error(found, expected) < 1e-2
    # Attention with the decoded cache, in float32.
    _, expected = jax.jit(attend)(
        {name: q.dequantize() for name, q in end.items()},
        TOKENS - 1,
        *(x[-1] for x in tokens()),
    )
    assert relative_error(out[-1], expected) < 2e-2


def test_rotation_reduces_the_error_of_large_channels():
    """The step of a code falls from the largest channel, 20 times the others, over 8 to
    the largest of 64 sums of all channels."""
    k, _, q = tokens()
    exact = jnp.einsum("qhd,khd->hqk", q, k)
    format, floats = eqquant.Int4(block_size=SIZE), {"recent": 0, "sinks": 0}
    product = eqquant.quaxify(jnp.einsum, on_materialise="error")
    errors = [
        relative_error(
            product(
                "qhd,khd->hqk",
                q,
                eqquant.trees.quantize_cache(k, format, rotate=r, **floats),
            ),
            exact,
        )
        for r in (False, True)
    ]
    assert errors[1] < errors[0] / 2


def test_axes_and_other_leaves():
    cache = {"layers": [empty("bfloat16")], "length": jnp.int32(3), "name": "a"}
    axes = {"layers": -1, "length": -1, "name": -1}
    found = eqquant.trees.quantize_cache(cache, "int4", axis=axes, rotate=True)
    assert found["name"] == "a" and found["length"] is cache["length"]
    keys = found["layers"][0]["k"]
    assert keys.dtype == jnp.bfloat16 and keys.axis == -1 and keys.block == 8
    simple = eqquant.trees.quantize_cache(
        cache, "int4", axis=axes, rotate=True, recent=0, sinks=0
    )["layers"][0]["k"]
    assert type(simple.base) is eqquant.QuantizedArray and simple.axes == (-1,)
    assert eqx.tree_equal(eqquant.trees.quantize_cache(found, "int8"), found)
    with pytest.raises(ValueError, match="axis must be .*pytree"):
        eqquant.trees.quantize_cache(cache, "int4", axis={"layers": -1})


def test_odd_sizes_cannot_be_rotated():
    with pytest.raises(ValueError, match="even head size.*63.*rotate=False"):
        eqquant.trees.quantize_cache({"k": jnp.zeros((2, 63))}, "int8", rotate=True)


def test_every_row_has_its_own_scales():
    q = eqquant.trees.quantize_cache(
        jnp.zeros((HEADS, TOKENS, SIZE)), "int8", rotate=True
    )
    assert q.base.scales.shape == (HEADS, TOKENS, 1)
    row = jnp.full((HEADS, SIZE), 2.0)
    update = eqquant.quaxify(lambda q, row: q.at[:, 5].set(row))
    changed = np.asarray(update(q, row).dequantize())
    assert np.allclose(changed[:, 5], 2, atol=0.02)
    assert not changed[:, :5].any() and not changed[:, 6:].any()


@pytest.mark.parametrize(
    "format, options, recent, sinks",
    [
        ("int4", {}, 64, 4),
        ("nf3", {}, 64, 4),
        ("int4", {"recent": 8}, 8, 4),
        ("int4", {"sinks": 0}, 64, 0),
        ("int4", {"window": 40}, 40, 4),
    ],
)
def test_rotation_in_few_bits_keeps_some_tokens(format, options, recent, sinks):
    cache: Any = eqquant.trees.quantize_cache(
        jnp.zeros((HEADS, 100, SIZE)), format, rotate=True, **options
    )
    assert cache.base.recent.shape[-2] == recent and cache.base.sinks == sinks


def test_other_caches_keep_no_tokens_by_default():
    zeros = jnp.zeros((HEADS, 100, SIZE))
    for format, rotate in (("int8", True), ("fp8", True), ("int4", False)):
        cache: Any = eqquant.trees.quantize_cache(zeros, format, rotate=rotate)
        assert type(cache.base if rotate else cache) is eqquant.QuantizedArray
    short: Any = eqquant.trees.quantize_cache(zeros[:, :3], "int4", rotate=True)
    assert short.base.recent.shape[-2] == short.base.sinks == 3


def test_products_need_the_axis_of_tokens():
    k, _, q = tokens()
    scores = eqquant.quaxify(
        lambda q, k: jnp.einsum("qhd,khd->hqk", q, k), on_materialise="error"
    )
    with pytest.raises(ValueError, match="this axis counts tokens.*pass `tokens`"):
        scores(q, eqquant.trees.quantize_cache(k, "int4", rotate=True))
    found = scores(q, eqquant.trees.quantize_cache(k, "int4", rotate=True, tokens=-3))
    # All 24 tokens are in floating point.
    assert relative_error(found, jnp.einsum("qhd,khd->hqk", q, k)) < 1e-5
