"""`jax.tree.map` over several quantized models must not compute with their codes."""

import functools as ft
import operator
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical
from jax import lax
from jax.sharding import PartitionSpec as P


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


def with_paths(fn, *trees):
    return jax.tree.map_with_path(lambda _, *leaves: fn(*leaves), *trees)


def in_jit(fn, *trees):
    return jax.jit(lambda *trees: jax.tree.map(fn, *trees))(*trees)


def with_paths_in_jit(fn, *trees):
    return jax.jit(lambda *trees: with_paths(fn, *trees))(*trees)


def in_scan(fn, *trees):
    def step(carry, _):
        return jax.tree.map(fn, carry, *trees[1:]), None

    return jax.lax.scan(step, trees[0], length=2)[0]


def in_vmap(fn, *trees):
    trees = [[a, b] for a, _, b in trees]  # Of 16 rows.
    return jax.vmap(lambda *trees: jax.tree.map(fn, *trees))(*trees)


MAPS = [jax.tree.map, with_paths, in_jit, with_paths_in_jit]
IN_TRACES = {
    "jnp.add": jnp.add,
    "a function under jit": jax.jit(lambda a, b: a + b),
    "a reshaped sum": lambda a, b: (a + b).ravel().reshape(a.shape),
    "a sum over a stack": lambda a, b: jnp.stack([a, b]).sum(0).astype(a.dtype),
    "a sum that is limited": lambda a, b: jnp.clip(a + b, 0, 15).astype(a.dtype),
    "half a choice": lambda a, b: jnp.where(jnp.arange(a.shape[-1]) > 3, a, a - b),
    "an update": lambda a, b: a.at[:2].add(b[:2]),
    "an update with a sum": lambda a, b: a.at[:2].set((a + b)[:2]),
    "cumsum": lambda a, b: jnp.cumsum(jnp.stack([a, b]), 0)[1].astype(a.dtype),
    "a branch": lambda a, b: lax.cond(a[0, 0] > 3, lambda: a + b, lambda: a),
    "a carry": lambda a, b: lax.fori_loop(0, 2, lambda i, c: c + b, a),
    "a carry that moves": lambda a, b: lax.scan(
        lambda c, _: ((c[1], c[0] + b), None), (a, b), length=3
    )[0][0],
    "rows of a scan": lambda a, b: lax.scan(lambda c, x: (c, c + x), a[0], b)[1],
    "a while loop": lambda a, b: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + b), (0, a)
    )[1],
    "nested": lambda a, b: lax.cond(
        a[0, 0] > 3, lambda: lax.map(sum, (a, b)), lambda: a
    ),
    "jax.checkpoint": jax.checkpoint(operator.add),
    "a sum before a branch": lambda a, b: lax.cond(
        a[0, 0] > 3, lambda x: x[::-1], lambda x: x, a + b
    ),
}
CHOICES_IN_TRACES = {
    "a branch": lambda p, a, b: lax.cond(p, lambda: a, lambda: b),
    "a carry": lambda p, a, b: lax.fori_loop(0, 2, lambda i, c: jnp.where(p, a, c), b),
    "rows of a loop": lambda p, a, b: lax.fori_loop(
        0, len(a), lambda i, c: c.at[i].set(jnp.where(p, a, b)[i]), b
    ),
    "rows of a scan": lambda p, a, b: lax.scan(
        lambda c, x: (c + 1, jnp.where(p, *x)), 0, (a, b)
    )[1],
    "a while loop": lambda p, a, b: lax.while_loop(
        lambda c: (c[0] + 1) * 2 < 4, lambda c: (c[0] + 1, jnp.where(p, a, b)), (0, b)
    )[1],
    "jax.checkpoint": jax.checkpoint(jnp.where),
}


@pytest.mark.parametrize("tree_map", [*MAPS, in_scan, in_vmap])
@pytest.mark.parametrize("fn", ARITHMETIC.values(), ids=ARITHMETIC)
def test_arithmetic_raises(fn, tree_map, models):
    with pytest.raises(TypeError, match="average_trees"):
        tree_map(fn, *models)


@pytest.mark.parametrize("models", ["nf4", "int8"], indirect=True)
@pytest.mark.parametrize("fn", IN_TRACES.values(), ids=IN_TRACES)
def test_traced_arithmetic_raises(fn, models):
    with pytest.raises(TypeError, match="average_trees"):
        in_jit(fn, *models)


def test_three_models(models):
    with pytest.raises(TypeError, match="average_trees"):
        jax.tree.map(lambda a, b, c: a + b - c, *models, models[0][::-1][:3])


@pytest.mark.parametrize("tree_map", MAPS)
@pytest.mark.parametrize("fn", CHOICES.values(), ids=CHOICES)
def test_choices_are_kept(fn, tree_map, models):
    if tree_map in (in_jit, with_paths_in_jit) and fn is CHOICES["copy"]:
        fn = lambda a, b: jnp.array(b)
    got = tree_map(fn, *models)
    expected = [fn(*pair) for pair in zip(*map(jax.tree.leaves, models), strict=True)]
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        assert_identical(a, b)


def moment(a, b):
    state = optax.EmaState(count=jnp.zeros((), jnp.int32), ema=b)
    return optax.ema(0.9).update(a, state)[0]


JIT = pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
SUMS = [eqx.apply_updates, optax.apply_updates, optax.tree.add, optax.tree.sub]
AVERAGES = [moment, lambda a, b: optax.incremental_update(a, b, 0.1)]


@JIT
@pytest.mark.parametrize("fn", SUMS)
def test_sums_by_optax_raise(fn, jit, models):
    with pytest.raises(TypeError, match="average_trees"):
        jit(fn)(*models)


@JIT
@pytest.mark.parametrize("fn", AVERAGES)
def test_averages_by_optax_cannot_be_used(fn, jit, models):
    """Their codes are floats. Until then, the tree may hold the moments of scales."""
    got = jit(fn)(*models)
    with pytest.raises(TypeError, match="Codes cannot be trained or averaged"):
        _ = got[0] @ jnp.ones(64)


@JIT
def test_periodic_updates_choose(jit, models):
    update = jit(lambda a, b, i: optax.periodic_update(a, b, i, 2))
    for i, chosen in enumerate(models):
        got = update(*models, jnp.asarray(i))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(chosen), strict=True):
            assert_identical(a, b)


@pytest.mark.parametrize("fn", CHOICES_IN_TRACES.values(), ids=CHOICES_IN_TRACES)
def test_choices_of_arrays_made_in_the_same_trace(fn, normal):
    """The arithmetic that has encoded these arrays is not the last operation."""
    weights = normal(16, 64), normal(16, 64)

    @jax.jit
    def run(*weights):
        arrays = [eqquant.quantize(w, "int8") for w in weights]
        choose = ft.partial(fn, jnp.sum(weights[0]) < jnp.inf)
        return jax.tree.map(choose, *arrays)

    expected = jax.jit(eqquant.quantize, static_argnums=1)(weights[0], "int8")
    assert_identical(run(*weights).codes, expected.codes)


@pytest.mark.parametrize("fn", [lax.psum, lax.pmean])
def test_sums_over_devices_raise(fn, models):
    model = models[0][0]
    mesh = jax.make_mesh((1,), ("i",))
    total = lambda q: fn(q, "i")
    with pytest.raises(TypeError, match="average_trees"):
        jax.shard_map(total, mesh=mesh, in_specs=P(), out_specs=P())(model)
    with pytest.raises(TypeError, match="average_trees"):
        jax.vmap(total, axis_name="i")(jax.tree.map(lambda x: x[None], model))


@pytest.mark.parametrize("models", ["nf4", "int8"], indirect=True)
@pytest.mark.parametrize("nested", [1, 2])
def test_mapped_axes_may_move(nested, models):
    """The mapped axis of the result of a loop under `vmap` is not its first."""
    fn = ft.partial(jax.tree.map, lambda a, b: lax.map(sum, (a, b)))
    trees = [model[:1] for model in models]
    for _ in range(nested):
        fn = jax.vmap(fn)
        trees = [jax.tree.map(lambda x: jnp.stack([x, x]), tree) for tree in trees]
    for jit in lambda fn: fn, jax.jit:
        with pytest.raises(TypeError, match="average_trees"):
            jit(fn)(*trees)


@pytest.mark.parametrize("get", [lambda q: q.T, lambda q: q.reshape(4, 4, 64)])
def test_averages_cannot_be_moved(get, models):
    average = moment(*models)[0]
    with pytest.raises(TypeError, match="Codes cannot be trained or averaged"):
        get(average)


def test_leaves_added_by_hand_are_not_checked(models):
    """A limit that docs/when-training-fails.md states."""
    leaves, tree = jax.tree.flatten(models[0])
    got = jax.tree.unflatten(
        tree, map(operator.add, leaves, jax.tree.leaves(models[1]))
    )
    assert jax.tree.structure(got) == tree


ALONE = {
    "models of a stack": lambda x: x.sum(0).astype(x.dtype),
    "a product": lambda x: (0.9 * x).astype(x.dtype),
    "a moving average over layers": lambda x: (0.9 * x + 0.1 * x[::-1]).astype(x.dtype),
    "bits": lambda x: x ^ x[::-1] if x.dtype == jnp.uint8 else x,
    "a scan": lambda x: lax.scan(lambda c, y: (c + y, None), x[0], x[1:])[0],
}
CHOICES_ALONE = {
    "a layer": lambda x: x[0],
    "an order": lambda x: x[::-1],
    "a repeated layer": lambda x: jnp.repeat(x, 2, 0),
    "a mask": lambda x: jnp.where(jnp.arange(len(x)) % 2 > 0, x.T, x[:1].T).T,
    "a barrier": lax.optimization_barrier,
}


@pytest.mark.parametrize("fn", ALONE.values(), ids=ALONE)
def test_one_model_is_checked_in_jit(fn, models):
    """Outside of `jit`, the check would read all codes of a model."""
    model, wanted = models[0][0], models[0][0].format.code_dtype
    if fn is ALONE["bits"] and wanted != jnp.uint8:
        return
    stack = jax.tree.map(lambda a, b: jnp.stack([a, b]), model, models[1][0])
    with pytest.raises(TypeError, match="average_trees"):
        jax.jit(ft.partial(jax.tree.map, fn))(stack)
    assert jax.tree.structure(jax.tree.map(fn, stack)) == jax.tree.structure(model)


@pytest.mark.parametrize("fn", CHOICES_ALONE.values(), ids=CHOICES_ALONE)
def test_choices_from_one_model_are_kept(fn, models):
    stack = jax.tree.map(lambda a, b: jnp.stack([a, b]), models[0][0], models[1][0])
    got = jax.jit(ft.partial(jax.tree.map, fn))(stack)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(stack), strict=True):
        assert_identical(a, fn(b))
