"""Control flow and custom rules, under `quaxify`."""

import eqquant
import equinox as eqx
import jax
import jax.custom_batching
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import pytest
from eqquant import Int8, NF4
from eqquant.dispatch._interpreter import Interpreter
from helpers import assert_identical, fast, KINDS, pairs, relative, slow, strict
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from test_dispatch import check, check_exact


@pytest.fixture
def weights(default_format, normal):
    make = lambda *shape: eqquant.quantize(normal(*shape) / 8, default_format)
    return make(64, 64), make(3, 64, 64), normal(5, 64)


# Control flow is independent of the format.
BOTH = [NF4(), Int8()]


def layer(x, w):
    return jnp.tanh(x @ w.T)


FLOW = {
    "jit": lambda w, ws, x: jax.jit(layer)(x, w),
    "remat": lambda w, ws, x: jax.checkpoint(layer)(x, w),
    "scan, stacked": lambda w, ws, x: lax.scan(lambda x, w: (layer(x, w), x), x, ws),
    "scan, constant": lambda w, ws, x: lax.scan(
        lambda x, _: (layer(x, w), x), x, None, length=3
    ),
    "scan, carried": lambda w, ws, x: lax.scan(
        lambda c, _: ((layer(c[0], c[1]), c[1]), None), (x, w), None, length=3
    )[0][0],
    "while, constant": lambda w, ws, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1], w)), (0, x)
    )[1],
    "while, carried": lambda w, ws, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1], c[2]), c[2]), (0, x, w)
    )[1],
    "cond": lambda w, ws, x: lax.cond(
        x[0, 0] > 0, lambda w: layer(x, w), lambda w: -layer(x, w), w
    ),
    "switch": lambda w, ws, x: lax.switch(
        2, [lambda w: x @ w, lambda w: x @ w.T, lambda w: layer(x, w)], w
    ),
    "switch, used or not": lambda w, ws, x: lax.switch(
        2, [lambda w: x, lambda w: x @ w.T, lambda w: layer(x, w)], w
    ),
    "fori_loop": lambda w, ws, x: lax.fori_loop(0, 3, lambda i, x: layer(x, ws[i]), x),
    "map": lambda w, ws, x: lax.map(lambda w: layer(x, w), ws),
}


@pairs("name, default_format", FLOW, BOTH)
def test_control_flow(name, weights):
    fn = FLOW[name]
    check(fn, *weights)
    check(lambda *args: jax.jit(fn)(*args), *weights)


@pairs("name, default_format", [n for n in FLOW if "while" not in n], BOTH)
def test_gradients_from_inside_and_outside(name, weights):
    fn = FLOW[name]

    def gradient(w, ws, x):
        loss = lambda x: sum(map(jnp.sum, jax.tree.leaves(fn(w, ws, x))))
        return jax.grad(loss)(x)

    w, ws, x = weights
    expected = gradient(w.dequantize(), ws.dequantize(), x)
    # The branches of this switch return a weight and a transposed weight, which cannot
    # be one quantized array.
    policy = "allow" if name == "switch" else "error"
    inside = eqquant.quaxify(gradient, on_materialise=policy)(w, ws, x)
    assert relative(inside, expected) < 1e-3  # Through three applications of tanh.
    outside = jax.grad(
        lambda x: sum(map(jnp.sum, jax.tree.leaves(strict(fn)(w, ws, x))))
    )(x)
    assert relative(outside, expected) < 1e-3


def test_structure_through_control_flow(weights):
    w, *_ = weights
    swap = lambda w: lax.cond(True, lambda w: w, lambda w: w[::-1], w)
    assert check_exact(swap, w)
    assert check_exact(lambda w: lax.fori_loop(0, 3, lambda i, w: w[::-1], w), w)


def test_what_becomes_dense_in_a_loop_starts_dense(weights):
    w, _, x = weights
    step = lambda w: w * 0.5 + 1
    fns = [
        lambda w: lax.scan(lambda w, _: (step(w), None), w, None, length=3)[0],
        lambda w: lax.fori_loop(0, 3, lambda i, w: step(w), w),
        lambda w: lax.while_loop(lambda w: w[0, 0] < 1.5, step, w),
        lambda w: lax.cond(x[0, 0] > 9, lambda w: w, step, w),
        lambda w: lax.scan(lambda c, _: (w, None), step(w), None, length=2)[0],
    ]
    for fn in fns:
        got = eqquant.quaxify(fn, on_materialise="allow")(w)
        assert relative(eqquant.dequantize(got), fn(w.dequantize())) < 1e-6
        with pytest.raises(eqquant.MaterialiseError):
            strict(fn)(w)


#
# Custom rules
#


@jax.custom_vjp
def times_three_backwards(x, w):
    return x @ w.T


times_three_backwards.defvjp(
    lambda x, w: (x @ w.T, w), lambda w, ct: (3 * ct @ w, jnp.zeros(w.shape))
)


@jax.custom_jvp
def times_three_forwards(x, w):
    return x @ w.T


times_three_forwards.defjvp(
    lambda primals, tangents: (
        primals[0] @ primals[1].T,
        3 * tangents[0] @ primals[1].T,
    )
)


@pairs("fn, default_format", [times_three_backwards, times_three_forwards], BOTH)
def test_custom_derivatives_are_kept(fn, weights):
    w, _, x = weights
    check(lambda x, w: fn(x, w), x, w)
    expected = 3 * jnp.ones((5, 64)) @ w.dequantize()
    loss = lambda x, w: jnp.sum(fn(x, w))
    outside = jax.grad(lambda x: eqquant.quaxify(loss)(x, w))(x)
    assert relative(outside, expected) < 1e-4
    inside = eqquant.quaxify(jax.grad(loss), on_materialise="error")(x, w)
    assert relative(inside, expected) < 1e-4
    under_jit = jax.jit(jax.grad(lambda x: eqquant.quaxify(jax.jit(loss))(x, w)))(x)
    assert relative(under_jit, expected) < 1e-4


def test_custom_batching_is_kept(weights):
    @jax.custom_batching.custom_vmap
    def product(w, x):
        return w @ x

    @product.def_vmap
    def _(axis_size, in_batched, w, x):
        assert in_batched == [False, True]
        return 5 * (x @ w.T), True

    w, _, x = weights
    check(lambda w, x: product(w, x[0]), w, x)
    expected = 5 * (x @ w.dequantize().T)
    outside = jax.vmap(lambda x: strict(product)(w, x))(x)
    inside = strict(lambda w, x: jax.vmap(lambda x: product(w, x))(x))(w, x)
    assert relative(outside, expected) < 1e-4
    assert relative(inside, expected) < 1e-4


#
# Meshes
#


@pairs(
    "specs, check_vma, default_format",
    [
        (P(), P("x"), P(None, "x")),
        (P(None, "x"), P(None, "x"), P()),
        (P("x"), P(), P("x")),
    ],
    [True, False],
    fast("nf4", "int8", formats=KINDS),
)
def test_shard_map(specs, check_vma, default_format, normal):
    x_spec, w_spec, out_spec = specs
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, x = eqquant.quantize(normal(16, 512), default_format), normal(8, 512)

    def local(x, w):
        y = x @ w.T
        return lax.psum(y, "x") if out_spec == P() else y

    fn = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(x_spec, w_spec),
        out_specs=out_spec,
        check_vma=check_vma,
    )
    check(fn, x, q)
    loss = lambda x, w: jnp.sum(jnp.sin(fn(x, w)))
    expected = jax.grad(loss)(x, q.dequantize())
    # The cosine of values near 20 amplifies rounding errors 20 times.
    assert relative(jax.grad(lambda x: strict(loss)(x, q))(x), expected) < 2e-3


#
# Compilation
#


def test_eager_calls_do_not_compile_again(normal):
    q, x = eqquant.quantize(normal(8, 64), "nf4"), normal(3, 64)
    inner = jax.jit(lambda x, w: jnp.sin(x @ w.T))
    fn = strict(lambda x, w: inner(x, w) + 1)
    fn(x, q)
    with jax.log_compiles(False), CountCompiles() as count:
        for _ in range(3):
            fn(x, q)
    assert count.value == 0


class CountCompiles:
    def __enter__(self):
        import jax.monitoring

        self.value = 0

        def listen(event, *args, **kwargs):
            self.value += "backend_compile" in event

        jax.monitoring.register_event_duration_secs_listener(listen)
        return self

    def __exit__(self, *args):
        import jax.monitoring

        jax.monitoring.clear_event_listeners()


def test_nothing_is_left_at_run_time(normal):
    model = eqquant.quantize_tree(eqx.nn.MLP(64, 64, 64, 2, key=jax.random.key(0)))
    x = normal(5, 64)
    dynamic, static = eqx.partition(model, eqx.is_array)
    plain = lambda d, x: jax.vmap(eqx.combine(d, static))(x)
    wrapped = lambda d, x: strict(jax.vmap(eqx.combine(d, static)))(x)
    text = lambda fn: jax.jit(fn).lower(dynamic, x).compile().cost_analysis()["flops"]
    assert text(wrapped) == text(plain)


NESTED = {
    "cond": lambda inner, x: lambda w: lax.cond(x[0, 0] > 0, inner, jnp.zeros_like, w),
    "scan": lambda inner, _: (
        lambda w: lax.scan(lambda w, _: (inner(w), 0), w, None, 2)[0]
    ),
    "while": lambda inner, x: (
        lambda w: lax.while_loop(
            lambda w_i: w_i[1] < 2, lambda w_i: (inner(w_i[0]), w_i[1] + 1), (w, 0)
        )[0]
    ),
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_bodies_are_interpreted_once(kind, normal, monkeypatch):
    """Otherwise the time would double with each level."""
    count, dispatched = 0, Interpreter.apply

    def counted(self, eqn, args):
        nonlocal count
        count += eqn.primitive is lax.dynamic_update_slice_p
        return dispatched(self, eqn, args)

    monkeypatch.setattr(Interpreter, "apply", counted)
    x = normal(1, 64)
    fn = lambda w: lax.dynamic_update_slice(w, x, (1, 0))
    for _ in range(6):
        fn = NESTED[kind](fn, x)
    got = jax.eval_shape(strict(fn), eqquant.quantize(normal(4, 64), "int8"))
    assert eqquant.is_quantized(got) and count == 1


@pytest.mark.slow
def test_no_tracer_leaks(normal):
    q, x = eqquant.quantize(normal(4, 64), "int8"), normal(64)
    layer = eqx.nn.Conv1d(16, 16, 3, key=jax.random.key(0))
    layer = eqquant.quantize_tree(layer, "int8")
    programs = [
        lambda x: strict(jnp.matmul)(q, jnp.sin(x)),
        lambda x: strict(lax.map)(lambda row: row @ x, q),
        lambda x: strict(lax.cond)(True, lambda w: w @ x, lambda w: -(w @ x), q),
        lambda x: strict(layer)(x.reshape(16, 4)),
    ]
    with jax.checking_leaks():
        for program in programs:
            jax.jit(jax.grad(lambda x: jnp.sum(program(x)))).lower(x)  # noqa: B023


LOOPS = {
    "scan": lambda w: lax.scan(lambda c, row: (c + row.sum(), 2 * row), 0.0, w),
    "map": lambda w: lax.map(lambda row: 2 * row, w),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("shape", [(64, 64), (64, 4), (64, 64, 4)])
def test_loops_over_a_blocked_axis_decode(name, shape, normal):
    q, loop = eqquant.quantize(normal(*shape), "int8", axis=0), LOOPS[name]
    with pytest.raises(eqquant.MaterialiseError):
        strict(loop)(q)
    got = eqquant.quaxify(loop, on_materialise="allow")(q)
    assert_identical(got, loop(q.dequantize()))


def test_loops_over_the_rows_of_an_adapter_decode(normal):
    """The first axis of `a` is the rank, not the rows."""
    q = eqquant.lora_tree(
        {"w": eqquant.quantize(normal(64, 64), "int8")}, 64, key=jax.random.key(0)
    )["w"]
    loop = eqquant.quaxify(LOOPS["map"], on_materialise="allow")
    assert_identical(loop(q), LOOPS["map"](q.dequantize()))


def test_a_loop_that_drops_the_blocked_axis_raises(normal):
    q = eqquant.quantize(normal(64, 64), "int8", axis=0)
    with pytest.raises(ValueError, match="eqquant.quaxify"):
        lax.map(lambda row: row.dequantize(), q)


@pytest.mark.parametrize("axis", [1, 2])
def test_loops_of_different_lengths_carry_arrays(axis, normal):
    """`vmap` of a loop makes one loop with a predicate for each element."""
    caches = eqquant.quantize(normal(3, 4, 4), "int8", axis=axis)
    lengths, rows = jnp.array([0, 3, 1]), normal(4, 4)

    def fill(cache, length):
        step = lambda state: (state[0] + 1, state[1].at[state[0]].set(rows[state[0]]))
        return lax.while_loop(lambda state: state[0] < length, step, (0, cache))[1]

    def fill_all(caches, lengths):
        return jax.vmap(fill)(caches, lengths)

    run = eqquant.quaxify(fill_all, on_materialise="error" if axis == 2 else "allow")
    got = eqquant.dequantize_tree(run(caches, lengths))
    expected = fill_all(caches.dequantize(), lengths)
    # The rows are rounded to int8 if the cache stays quantized.
    assert relative(got, expected) < (1e-2 if axis == 2 else 1e-7)
    assert_identical(got[0], caches[0].dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["cg", slow("gmres"), slow("bicgstab")])
def test_linear_solves(solver, normal):
    w, b = normal(64, 64), normal(64)
    q = eqquant.quantize(w @ w.T / 64 + jnp.eye(64), "int8", precision="highest")
    solve = getattr(jax.scipy.sparse.linalg, solver)
    fn = lambda w, b: solve(lambda x: jnp.matmul(w, x, precision="highest"), b)[0]
    slope = lambda fn: jax.grad(lambda b: jnp.sum(fn(b) ** 2))(b)
    assert relative(strict(fn)(q, b), fn(q.dequantize(), b)) < 1e-3
    got = slope(lambda b: strict(fn)(q, b))
    assert relative(got, slope(lambda b: fn(q.dequantize(), b))) < 1e-3
    of_scales = jax.grad(lambda q: jnp.sum(strict(fn)(q, b)), allow_int=True)(q).scales
    by_hand = lambda s: jnp.sum(fn(q.replace(scales=s).dequantize(), b))
    assert relative(of_scales, jax.grad(by_hand)(q.scales)) < 1e-3


@pytest.mark.slow
def test_a_linear_solve_for_each_right_hand_side(normal):
    """Each takes another number of steps."""
    q = eqquant.quantize(jnp.eye(64) + 0.01 * jnp.ones((64, 64)), "int8")
    b = jnp.stack([normal(64), jnp.ones(64), jnp.zeros(64)])
    solve = lambda w, b: jax.scipy.sparse.linalg.cg(lambda x: w @ x, b)[0]
    expected = jax.vmap(solve, (None, 0))(q.dequantize(), b)
    inside = strict(lambda w, b: jax.vmap(lambda b: solve(w, b))(b))
    assert relative(inside(q, b), expected) < 1e-3
    outside = jax.vmap(lambda b: strict(solve)(q, b))
    assert relative(outside(b), expected) < 1e-3


def test_linear_solves_with_auxiliary_results(normal):
    q, b = eqquant.quantize(jnp.eye(64) + 0.01 * normal(64, 64), "int8"), normal(64)

    def solve(multiply, b):
        step = lambda _, x: x - 0.5 * (multiply(x) - b)
        x = lax.fori_loop(0, 20, step, jnp.zeros_like(b))
        return x, jnp.sum(x)

    def fn(w, b):
        multiply = lambda x: w @ x
        return lax.custom_linear_solve(multiply, b, solve, solve, has_aux=True)

    dense = q.dequantize()
    for a, c in zip(strict(fn)(q, b), fn(dense, b), strict=True):
        assert relative(a, c) < 1e-3
    slope = lambda fn: jax.grad(lambda b: jnp.sum(fn(b)[0] ** 2))(b)
    got = slope(lambda b: strict(fn)(q, b))
    assert relative(got, slope(lambda b: fn(dense, b))) < 1e-3
