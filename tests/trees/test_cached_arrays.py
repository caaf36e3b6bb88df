"""Caches with tokens in floating point, scales per channel, and ring buffers."""

from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.arrays import CachedArray, RotatedArray
from helpers import equations_of
from jax import lax


HEADS, TOKENS, SIZE = 3, 64, 32
INT4 = eqquant.Int4(block_size=8)
# The largest error: a step, because codes run from -8 to 7. No value exceeds 4.5.
STEP = 4.5 / 8

OPTIONS = {
    "recent": {"recent": 8, "sinks": 2},
    "per channel": {"recent": 16, "sinks": 2, "per_channel": True},
    "window": {"window": 12, "longest": 20},
    "window, recent": {"window": 12, "longest": 20, "recent": 3},
    "window, sinks": {"window": 12, "longest": 20, "recent": 3, "sinks": 2},
}
# The axis of the head size, whether to rotate, and the lengths of writes: single
# tokens, a prompt first, and a prompt that is longer than the slots.
CASES = {
    "ones": (-1, False, [1] * 40),
    "columns": (-2, False, [20, 1, 1, 1, 7]),
    "columns, rotated": (-2, True, [20, 1, 7]),
    "long, rotated": (-1, True, [48, 1]),
}


def tokens():
    return jax.random.normal(jax.random.key(0), (HEADS, TOKENS, SIZE))


def columns(x, axis):
    """Store the head size at `axis`."""
    return jnp.swapaxes(x, -1, -2) if axis == -2 else x


def cache_of(array, axis, **options):
    options = {"recent": 0, "sinks": 0, **options}
    return eqquant.trees.quantize_cache(
        columns(array, axis), INT4, axis=axis, **options
    )


def writer(axis):
    def write(cache, rows, i):
        start = (0, 0, i) if axis == -2 else (0, i, 0)
        return lax.dynamic_update_slice(cache, columns(rows, axis), start)

    return jax.jit(eqquant.quaxify(write, on_materialise="error"), donate_argnums=0)


def written(cache, axis, lengths, values):
    write, position, structure = writer(axis), 0, jax.tree.structure(cache)
    for n in lengths:
        rows = values[:, position : position + n]
        cache = write(cache, rows, jnp.int32(position))
        position += n
        assert jax.tree.structure(cache) == structure
    return cache, position


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens(name, case):
    """Tokens in floats are exact, other tokens have the error of codes, and products
    equal products with the decoded array."""
    options, (axis, rotate, lengths) = OPTIONS[name], CASES[case]
    if options.get("longest", TOKENS) < max(lengths):
        pytest.skip("the ring buffer has fewer tokens")
    cache = cache_of(jnp.zeros((HEADS, TOKENS, SIZE)), axis, rotate=rotate, **options)
    assert type(cache) is (RotatedArray if rotate else CachedArray)
    values = tokens()
    cache, end = written(cache, axis, lengths, values)
    found = columns(cache.dequantize(), axis)
    error = np.abs(np.asarray(found - values)).max((0, 2))
    exact = {
        *range(end - options.get("recent", 0), end),
        *range(options.get("sinks", 0)),
    }
    # A rotation there and back rounds in float32.
    assert error[sorted(exact)].max(initial=0) < 1e-5
    seen = range(max(0, end - options.get("window", end)), end)
    assert error[seen].max() < STEP
    assert error[sorted({*seen} - exact)].min() > 1e-3
    assert not found[:, end:].any()

    k1, k2 = jax.random.split(jax.random.key(1))
    queries = jax.random.normal(k1, (HEADS, 5, SIZE))
    weights = jax.random.normal(k2, (HEADS, 5, TOKENS))
    kv = "hdk" if axis == -2 else "hkd"
    for x, equation in ((queries, f"hqd,{kv}->hqk"), (weights, f"hqk,{kv}->hqd")):
        product = eqquant.quaxify(jnp.einsum, on_materialise="error")
        expected = jnp.einsum(equation, x, columns(found, axis))
        np.testing.assert_allclose(product(equation, x, cache), expected, atol=1e-3)


def test_writes_may_go_back():
    """Padding after a prompt is overwritten, and groups are quantized again."""
    values = tokens()
    padded = values.at[:, 10:].set(100.0)
    for options in (OPTIONS["recent"], OPTIONS["per channel"]):
        cache = cache_of(jnp.zeros((HEADS, TOKENS, SIZE)), -1, **options)
        write = writer(-1)
        cache = write(cache, padded[:, :20], jnp.int32(0))
        for i in range(10, 30):
            cache = write(cache, values[:, i : i + 1], jnp.int32(i))
        error = np.abs(np.asarray(cache.dequantize() - values))[:, :30].max((0, 2))
        assert error[30 - options["recent"] : 30].max() == 0
        assert error[16:].max() < STEP
        # Scales per channel: the padding was in the group of tokens 8 and 9.
        assert error[:8].max() < STEP and error[:10].max() < 100 / 14 + STEP


def test_last_write_may_be_anywhere():
    """Starts out of bounds are clamped, as in `lax`."""
    values = tokens()
    for options in OPTIONS.values():
        cache = cache_of(values, -1, **options)
        cache = writer(-1)(cache, values[:, :5], jnp.int32(TOKENS + 3))
        found = cache.dequantize()[:, -5:]
        assert np.abs(np.asarray(found - values[:, :5])).max() < STEP


@pytest.mark.parametrize("name", OPTIONS)
def test_layers_are_stacked_and_scanned(name):
    """A loop over layers carries the cache, writes one layer and attends to it."""
    layers, options = 2, OPTIONS[name]
    window = options.get("window", TOKENS)
    zeros = jnp.zeros((layers, HEADS, TOKENS, SIZE), "bfloat16")
    cache = cache_of(zeros, -1, **options)
    values = jax.random.normal(jax.random.key(0), (layers, HEADS, TOKENS, SIZE))
    query = jax.random.normal(jax.random.key(1), (HEADS, SIZE))
    keys = jnp.arange(TOKENS)

    def attend(x, i):
        scores = jnp.einsum("hd,hkd->hk", query, x.astype(jnp.float32))
        scores = jnp.where((keys <= i) & (keys > i - window), scores / 6, -jnp.inf)
        return jnp.einsum("hk,hkd->hd", jax.nn.softmax(scores), x.astype(jnp.float32))

    def step(cache, values, i):
        def layer(cache, inputs):
            index, row = inputs
            row = row[None, :, None].astype(cache.dtype)
            cache = lax.dynamic_update_slice(cache, row, (index, 0, i, 0))
            return cache, attend(lax.dynamic_index_in_dim(cache, index, 0, False), i)

        return lax.scan(layer, cache, (jnp.arange(layers), values[:, :, i]))

    step = jax.jit(eqquant.quaxify(step, on_materialise="error"), donate_argnums=0)
    out = jnp.zeros(())
    for i in range(45):
        cache, out = step(cache, values, jnp.int32(i))
    expected = jnp.stack([attend(x, 44) for x in values])
    error = jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)
    # Scores and values are rounded to a step of a seventh of the largest of eight.
    assert error < 0.15
    assert cache.dtype == jnp.bfloat16


SETS = {
    "a token": lambda c, x, i: c.at[:, i].set(x[:, 0]),
    "a token in place": lambda c, x, i: c.at[:, -1].set(x[:, 0]),
    "a slice": lambda c, x, i: c.at[:, 20:23].set(x[:, :3]),
    "out of bounds": lambda c, x, i: c.at[:, i + TOKENS].set(x[:, 0]),
    "clamped": lambda c, x, i: c.at[:, i + TOKENS].set(x[:, 0], mode="clip"),
    "tokens": lambda c, x, i: c.at[:, jnp.array([40, 1, 70])].set(x[:, :3]),
    "one for each head": lambda c, x, i: c.at[
        jnp.arange(HEADS), jnp.array([2, 30, 63])
    ].set(x[:, 0]),
    "mapped": lambda c, x, i: jax.vmap(
        lambda c, x, i: lax.dynamic_update_slice(c, x, (i, 0))
    )(c, x[:, :3], jnp.array([0, 20, 62])),
}
ONE_SLICE = {"a token", "a token in place", "a slice", "out of bounds", "clamped"}


@pytest.mark.parametrize("how", SETS)
@pytest.mark.parametrize("name", OPTIONS)
def test_sets(name, how):
    """Written tokens are exact if they are in slots, and others are as before unless
    they lose their slots."""
    options, values = OPTIONS[name], tokens()
    new = 1 + jax.random.normal(jax.random.key(3), (HEADS, 4, SIZE))
    for axis, rotate in ((-1, False), (-2, True)):
        cache = cache_of(values, axis, rotate=rotate, **options)
        change = lambda c, axis=axis: columns(
            SETS[how](columns(c, axis), new, jnp.int32(30)), axis
        )
        run = eqquant.quaxify(change, on_materialise="error")
        if how not in ONE_SLICE and {"window", "per_channel"} & {*options}:
            with pytest.raises(eqquant.MaterialiseError, match="`scatter`"):
                run(cache)
            continue
        before, after = cache.dequantize(), jax.jit(run)(cache)
        assert jax.tree.structure(after) == jax.tree.structure(cache)
        found, expected = after.dequantize(), change(before)
        error = np.abs(np.asarray(columns(found - expected, axis)))
        touched = np.asarray(columns(change(0 * before) != 0, axis)).any(-1)
        assert touched.any() == (how != "out of bounds")
        is_exact = options.get("recent", 0) >= 3
        # Values reach 5.5, so a step is 5.5 / 8. A rotation rounds in float32.
        assert error[touched].max(initial=0) < (1e-5 if is_exact else 5.5 / 8)
        if "window" not in options:  # In a ring buffer, they replace others.
            assert error[~touched].max() < STEP
        if how == "out of bounds":
            assert error.max() == 0


def test_no_float_array_of_all_tokens():
    """A step makes no float array with the elements of the cache, and a ring buffer
    needs the memory of the window."""
    long = 1024

    def step(cache, row, query, i):
        cache = lax.dynamic_update_slice(cache, row[:, None], (0, i, 0))
        scores = jnp.einsum("hqd,hkd->hqk", query, cache)
        return cache, jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), cache)

    row, query = jnp.ones((HEADS, SIZE)), jnp.ones((HEADS, 2, SIZE))
    full = jnp.zeros((HEADS, long, SIZE))
    run = eqquant.quaxify(step, on_materialise="error")

    def sizes(cache):
        equations = equations_of(jax.make_jaxpr(run)(cache, row, query, 3), None)
        avals = [var.aval for equation in equations for var in equation.outvars]
        return {x.size for x in avals if jnp.issubdtype(x.dtype, jnp.floating)}

    assert full.size in sizes(full)
    for options in OPTIONS.values():
        for rotate in (False, True):
            cache = cache_of(full, -1, rotate=rotate, **options)
            assert max(sizes(cache)) < full.size / 3
    ring: Any = cache_of(full, -1, window=12, longest=1)
    count = ring.nbytes / (ring.recent.nbytes + HEADS * 12 * 4)
    assert count == 1 and ring.recent.shape == (HEADS, 12, SIZE)


def test_structure():
    cache: Any = cache_of(tokens(), -1, recent=8, sinks=4)
    whole = cache.dequantize()
    for fn in (lambda x: x.swapaxes(0, 1), lambda x: x.mT, lambda x: x[1:]):
        moved = fn(cache)
        assert isinstance(moved, CachedArray)
        assert eqx.tree_equal(moved.dequantize(), fn(whole))
    assert cache.astype("bfloat16").dtype == jnp.bfloat16
    assert "recent=8" in repr(cache) and "first=4" in repr(cache)
    ring = cache_of(tokens(), -1, window=8)
    assert repr(ring).startswith(f"ring[{TOKENS}]")
    with pytest.raises(ValueError, match="Pass longest=5 to quantize_cache"):
        writer(-1)(ring, tokens()[:, :5], 0)
    # A window for all tokens needs no ring buffer.
    assert type(cache_of(tokens(), -1, window=99)) is eqquant.QuantizedArray


@pytest.mark.slow
def test_other_orders_of_axes():
    """Tokens first, as in Flax: `(tokens, heads, size)`."""
    x = jnp.moveaxis(tokens(), 1, 0)
    for options in OPTIONS.values():
        cache = eqquant.trees.quantize_cache(x, INT4, tokens=0, **options)
        write = lambda cache, row: lax.dynamic_update_slice(
            cache, row, (TOKENS - 1, 0, 0)
        )
        write = eqquant.quaxify(write, on_materialise="error")
        cache = write(cache, 2 * x[:1])
        assert np.abs(np.asarray(cache.dequantize()[-1] - 2 * x[0])).max() < 2 * STEP
        query = jnp.ones((HEADS, SIZE))
        scores = eqquant.quaxify(jnp.einsum, on_materialise="error")
        found = scores("hd,khd->hk", query, cache)
        expected = jnp.einsum("hd,khd->hk", query, cache.dequantize())
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recent": -1}, "recent must be 0 or more, got -1"),
        ({"longest": 0}, "longest must be 1 or more"),
        ({"recent": TOKENS + 1}, "at most the 64 tokens.*recent=65"),
        ({"window": -2}, "window must be 0 or more.*window=-2"),
        ({"per_channel": True, "window": 8}, "pass one of them"),
        ({"per_channel": True}, "recent to be a multiple of 8"),
        ({"per_channel": True, "recent": 12}, "recent to be a multiple of 8"),
        ({"recent": 4, "tokens": -1}, "tokens must be another axis than axis"),
        ({"window": {"a": 3}}, "window must be one value, or a pytree"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        eqquant.trees.quantize_cache(tokens(), INT4, **options)


def test_groups_need_blocks():
    for format in (eqquant.Int8(), eqquant.NF4(double_quantization=True)):
        with pytest.raises(ValueError, match="needs a format with a block size"):
            eqquant.trees.quantize_cache(tokens(), format, per_channel=True, recent=64)
    with pytest.raises(ValueError, match="multiple of 24 tokens"):
        eqquant.trees.quantize_cache(
            tokens(), eqquant.Int4(block_size=24), per_channel=True, recent=24
        )
