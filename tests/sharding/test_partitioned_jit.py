"""Programs over 8 devices where Shardy says how products are split."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, largest_float
from eqquant import Int8, NF4
from eqquant.kernels.cpu import _library
from helpers import relative
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


M, SIZE = 8, 256
SUMS = 1e-6  # In float32, and of another order.
EXACT = NF4(precision="highest")
GATHERED = {("all-gather", "u8"), ("all-gather", "f32")}  # Codes and scales.
SUMMED = {("all-reduce", "f32")}


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(kind,) * 2)


def put(x, *spec, mesh=None):
    return jax.device_put(x, NamedSharding(mesh or mesh_of(), P(*spec)))


def kernels(compiled) -> bool:
    return isinstance(_library.load(), str) or "eqquant_dot" in compiled.as_text()


# Split alike by `jax.device_put`: no array has a plan.
@pytest.mark.parametrize(
    "spec, moved",
    [
        pytest.param(("m",), set(), marks=pytest.mark.slow),
        ((None, "m"), SUMMED),
        (("d", "m"), GATHERED | SUMMED),
        pytest.param((("m", "d"),), GATHERED, marks=pytest.mark.slow),
    ],
)
def test_what_is_moved_is_what_a_plan_moves(spec, moved, normal, recwarn):
    q, x = eqquant.quantize(normal(SIZE, SIZE), EXACT), normal(M, SIZE)
    args = put(x, "d"), put(q, *spec)
    fn = eqquant.partitioned_jit(lambda x, q: x @ q.T)
    compiled = fn.lower(*args).compile()
    assert collectives(compiled) == moved
    assert kernels(compiled) and largest_float(compiled) < q.size / 2
    assert relative(fn(*args), x @ q.T) < SUMS
    assert not [w for w in recwarn if "shard_tree" in str(w.message)]


@pytest.mark.slow
def test_scan_remat_and_gradients(normal):
    layers = eqquant.quantize(normal(3, SIZE, SIZE), Int8(precision="highest"))
    last, x = eqquant.quantize(normal(SIZE, SIZE), EXACT), normal(M, SIZE)
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w.T / 16))

    def loss(x, scales, layers, last):
        last = last.replace(scales=scales)

        def step(x, w):  # One weight is scanned over, the other a constant of the loop.
            return inner(x, w) @ last.T / 16, None

        return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, layers)[0] ** 2)

    gradient = jax.grad(loss, (0, 1))
    args = put(x, "d"), put(last.scales, None, "m"), put(layers, None, "m")
    args = *args, put(last, None, "m")
    fn = eqquant.partitioned_jit(gradient)
    compiled = fn.lower(*args).compile()
    assert collectives(compiled) == SUMMED
    assert kernels(compiled) and largest_float(compiled) < SIZE * SIZE / 2
    expected = gradient(x, last.scales, layers, last)
    for a, b in zip(fn(*args), expected, strict=True):
        assert relative(a, b) < 5 * SUMS


def test_a_model_with_a_constraint_and_what_is_static(normal):
    model = eqx.nn.MLP(SIZE, SIZE, SIZE, 1, key=jax.random.key(0))
    model = eqquant.quantize_tree(model, EXACT)
    x, mesh = normal(M, SIZE), mesh_of()
    split = eqx.filter_shard(model, NamedSharding(mesh, P()))
    weights = lambda model: [layer.weight for layer in model.layers]
    parts = zip(weights(model), [("m",), (None, "m")], strict=True)
    split = eqx.tree_at(weights, split, [put(w, *spec) for w, spec in parts])
    rows = NamedSharding(mesh, P(("d", "m")))

    @eqquant.partitioned_jit
    def run(model, x, *, name):
        y = jax.vmap(model)(x)
        return {name: jax.lax.with_sharding_constraint(y, rows)}

    compiled = run.lower(split, put(x, "d"), name="y").compile()
    # What is summed is left split by rows.
    assert {("reduce-scatter", "f32")} == collectives(compiled)
    got = run(split, put(x, "d"), name="y")
    assert relative(got["y"], jax.vmap(model)(x)) < SUMS


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_plans_and_explicit_axes_stay(normal):
    q, x = eqquant.quantize(normal(SIZE, SIZE), EXACT), normal(M, SIZE)
    fn = eqquant.partitioned_jit(lambda x, q: x @ q.T, donate_argnums=(0,))
    donated, expected = jnp.copy(x), jax.jit(lambda x, q: x @ q.T)(x, q)
    np.testing.assert_array_equal(fn(donated, q), expected)
    assert donated.is_deleted()
    planned = eqquant.shard_tree(q, mesh_of(), P(None, "m"), batch="d")
    assert collectives(fn.lower(put(x, "d"), planned).compile()) == SUMMED
    mesh = mesh_of(AxisType.Explicit)
    typed = put(x, "d", mesh=mesh), put(q, "m", mesh=mesh)
    with jax.set_mesh(mesh):
        assert collectives(fn.lower(*typed).compile()) == set()


def test_arguments_on_two_meshes(normal):
    q = eqquant.quantize(normal(SIZE, SIZE), EXACT)
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    fn = eqquant.partitioned_jit(lambda x, q: x @ q.T)
    with pytest.raises(ValueError, match="must be on the same mesh"):
        fn(put(normal(M, SIZE), "d"), put(q, "x", mesh=other))
