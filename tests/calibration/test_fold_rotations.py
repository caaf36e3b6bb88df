"""`fold_rotations`: which rotations are folded, and that results do not change."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant.calibration import fold_rotations
from hypothesis import given, strategies as st
from jax import lax


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


X = normal(6, 64, seed=9)
# Two weights in a row, a gain, and weights of other shapes.
MODEL = {
    "v": normal(64, 64, seed=1),
    "w": normal(48, 64, seed=2),
    "u": normal(64, 64, seed=3),
    "gain": 1 + normal(64, seed=4),
    "bias": normal(64, seed=5),
    "stack": normal(3, 64, 64, seed=6),
    "gains": 1 + normal(3, 64, seed=7),
    "table": normal(10, 64, seed=8),
}


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def folded(fn, model=MODEL, x=X, **options):
    """Return the block of each folded weight."""
    found = fold_rotations(fn, model, x, **options)
    assert found.difference < 1e-5
    # The check in `fold_rotations` compiles the function. This one does not.
    with jax.default_matmul_precision("highest"):
        assert jnp.allclose(fn(found.model, x), fn(model, x), rtol=1e-3, atol=1e-4)
    return {row.path: row.block for row in found.rows if row.block}


#
# Folded rotations
#


FOLDED = {
    "linear": lambda m, x: (x @ m["v"].T) @ m["w"].T,
    "bias": lambda m, x: (x @ m["v"].T + m["bias"]) @ m["w"].T,
    "negative": lambda m, x: -(x @ m["v"].T - m["bias"]) @ m["w"].T,
    "scaled": lambda m, x: (2 * (x @ m["v"].T) / 3) @ m["w"].T,
    "residual": lambda m, x: (x @ m["v"].T + x @ m["u"].T) @ m["w"].T,
    "norm": lambda m, x: norm(x @ m["v"].T) @ m["w"].T,
    "norm by square": lambda m, x: (
        ((y := x @ m["v"].T) / jnp.sqrt(jnp.square(y).sum(-1, keepdims=True)))
        @ m["w"].T
    ),
    "norm of Equinox": lambda m, x: (
        jax.vmap(eqx.nn.RMSNorm(64, use_weight=False, use_bias=False))(x @ m["v"].T)
        @ m["w"].T
    ),
    "gain": lambda m, x: (norm(x @ m["v"].T) * m["gain"]) @ m["w"].T,
    "gain in front": lambda m, x: (m["gain"] * norm(x @ m["v"].T)) @ m["w"].T,
    "gain with an offset": lambda m, x: (
        (norm(x @ m["v"].T) * (1 + m["gain"])) @ m["w"].T
    ),
    "gain in bfloat16": lambda m, x: (
        (norm(x @ m["v"].T) * m["gain"].astype(jnp.float32)) @ m["w"].T
    ),
    "gain for two weights": lambda m, x: jnp.concatenate(
        [(y := norm(x @ m["v"].T) * m["gain"]) @ m["w"].T, y @ m["w"].T], -1
    ),
    "rows of a table": lambda m, x: m["table"][jnp.arange(6)] @ m["w"].T,
    "rows of activations": lambda m, x: (x @ m["v"].T)[jnp.array([1, 1, 0])] @ m["w"].T,
    "mask": lambda m, x: (
        jnp.where(jnp.arange(6)[:, None] > 2, x @ m["v"].T, 0) @ m["w"].T
    ),
    "sum over rows": lambda m, x: (x @ m["v"].T).sum(0) @ m["w"].T,
    "sums of rows": lambda m, x: (
        jnp.zeros((4, 64)).at[jnp.arange(6) % 4].add(x @ m["v"].T) @ m["w"].T
    ),
    "attention": lambda m, x: jax.nn.softmax(x @ x.T) @ (x @ m["v"].T) @ m["w"].T,
    "vmap": lambda m, x: jax.vmap(lambda x: m["w"] @ (m["v"] @ x))(x),
    "jit": lambda m, x: jax.jit(lambda y: y @ m["w"].T)(x @ m["v"].T),
    "checkpoint": lambda m, x: jax.checkpoint(lambda m, y: y @ m["w"].T)(
        m, x @ m["v"].T
    ),
    "cond": lambda m, x: (
        lax.cond(x[0, 0] > 0, lambda y: y, lambda y: 2 * y, x @ m["v"].T) @ m["w"].T
    ),
    "while": lambda m, x: (
        lax.fori_loop(0, 3, lambda _, y: y + y, x @ m["v"].T) @ m["w"].T
    ),
    "used twice": lambda m, x: (y := x @ m["v"].T) @ m["w"].T + 2 * y @ m["w"].T,
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name):
    assert folded(FOLDED[name])["w"] == 64


def test_a_gain_becomes_one():
    forward = lambda m, x: (norm(x @ m["v"].T) * (m["gain"] + 1)) @ m["w"].T
    found = fold_rotations(forward, MODEL, X).model
    assert (found["gain"] == 0).all()
    assert (found["bias"] == MODEL["bias"]).all()


def test_heads_share_a_block():
    def forward(m, x):
        y = (x @ m["v"].T).reshape(6, 4, 16).swapaxes(0, 1)
        return y.swapaxes(0, 1).reshape(6, 64) @ m["w"].T

    assert folded(forward) == {"w": 16}
    assert folded(forward, rotate=8) == {"w": 8}


def test_slices_between_blocks():
    both = lambda m, x: jnp.concatenate([x @ m["v"].T, x @ m["u"].T], -1)
    forward = lambda m, x: both(m, x)[:, 32:96] @ m["w"].T
    assert folded(forward) == {"w": 32}


def test_layers_of_a_stack():
    def forward(m, x):
        def step(x, layer):
            weight, gain = layer
            return x + (norm(x) * gain) @ weight.T, x

        x, _ = lax.scan(step, m["table"][jnp.arange(6)], (m["stack"], m["gains"]))
        return norm(x) @ m["w"].T

    assert folded(forward) == {"w": 64, "stack": 64}


def test_a_layer_by_its_index():
    """Otherwise, `quantize_tree` would rotate the stack back."""

    def forward(m, x):
        step = lambda i, y: y + y @ m["stack"][i].T
        return lax.fori_loop(0, 3, step, x @ m["v"].T) @ m["w"].T

    assert folded(forward) == {"w": 64, "stack": 64}


def test_parts_of_weights():
    def forward(m, x):
        y = x @ m["v"].T
        return (y[:, :32] @ m["u"][:, :32].T) @ (2 * m["w"]).T

    assert folded(forward) == {"u": 32, "w": 64}


def test_matrices_of_experts():
    def forward(m, x):
        y = norm(x @ m["v"].T) * m["gain"]
        out = lax.ragged_dot(y, m["stack"].swapaxes(1, 2), jnp.array([2, 3, 1]))
        return out @ m["w"].T

    assert folded(forward) == {"w": 64, "stack": 64}


#
# Rotations that change results
#


KEPT = {
    "function": lambda m, x: jax.nn.relu(x @ m["v"].T) @ m["w"].T,
    "gate": lambda m, x: ((x @ m["v"].T) * (x @ m["u"].T)) @ m["w"].T,
    "mean": lambda m, x: ((y := x @ m["v"].T) - y.mean(-1, keepdims=True)) @ m["w"].T,
    "constant": lambda m, x: (x @ m["v"].T + 1) @ m["w"].T,
    "vector of numbers": lambda m, x: (x @ m["v"].T * jnp.arange(64.0)) @ m["w"].T,
    "input": lambda m, x: x @ m["w"].T,
    "residual of the input": lambda m, x: (x + x @ m["v"].T) @ m["w"].T,
    "result": lambda m, x: jnp.concatenate([(y := x @ m["v"].T) @ m["w"].T, y], -1),
    "maximum": lambda m, x: (
        ((y := x @ m["v"].T) / jnp.abs(y).max(-1, keepdims=True)) @ m["w"].T
    ),
    "sum": lambda m, x: (y := x @ m["v"].T) @ m["w"].T + y.sum(-1, keepdims=True),
    "running sum": lambda m, x: jnp.cumsum(x @ m["v"].T, -1) @ m["w"].T,
    "order": lambda m, x: (x @ m["v"].T)[:, ::-1] @ m["w"].T,
    "strided": lambda m, x: (x @ m["v"].T)[:, ::2] @ m["w"][:, :32].T,
    "slice inside of a block": lambda m, x: (x @ m["v"].T)[:, 1:63] @ m["w"][:, 2:].T,
    "mask of columns": lambda m, x: (
        jnp.where(jnp.arange(64) > 2, x @ m["v"].T, 0) @ m["w"].T
    ),
    "gain with another use": lambda m, x: (
        (norm(x @ m["v"].T) * m["gain"]) @ m["w"].T + m["gain"].sum()
    ),
    "gain with two offsets": lambda m, x: (
        (y := norm(x @ m["v"].T)) * m["gain"] @ m["w"].T
        + y * (1 + m["gain"]) @ m["w"].T
    ),
    "gain of a kept activation": lambda m, x: (
        (norm(x @ m["v"].T) * m["gain"]) @ m["w"].T + (x * m["gain"]) @ m["w"].T
    ),
    "gain as an activation": lambda m, x: (
        (norm(x @ m["v"].T) * m["gain"]) @ m["w"].T + (m["gain"] @ m["gain"])
    ),
    "with and without a gain": lambda m, x: (
        (y := norm(x @ m["v"].T)) @ m["w"].T + (y * m["gain"]) @ m["w"].T
    ),
    "gain for a table": lambda m, x: (
        ((m["w"][jnp.arange(6)] @ m["v"].T) @ m["v"] * m["gain"]) @ m["w"].T
    ),
    "part of a gain with an offset": lambda m, x: (
        (norm(x @ m["v"].T) * (1 + m["gain"])[None][jnp.zeros(6, int)]) @ m["w"].T
    ),
    "row of a vector with an offset": lambda m, x: (
        ((1 + m["bias"])[None][jnp.zeros(6, int)] + x @ m["v"].T) @ m["w"].T
    ),
    "gain behind a gain": lambda m, x: (
        (norm(x @ m["v"].T) * m["gain"] * m["bias"]) @ m["w"].T
    ),
    "gain in front of a sum": lambda m, x: (
        (norm(x @ m["v"].T) * m["gain"] + x @ m["u"].T) @ m["w"].T
    ),
    "square of a gain": lambda m, x: (
        (norm(x @ m["v"].T) * m["gain"]) @ m["w"].T * (m["gain"] * m["gain"]).sum()
    ),
    "squares with two bases": lambda m, x: (
        jnp.square(m["v"] @ m["u"]).sum(0) @ m["w"].T
    ),
    "fourth powers": lambda m, x: (
        ((y := x @ m["v"].T) / (y**4).sum(-1, keepdims=True)) @ m["w"].T
    ),
    "loop with a function": lambda m, x: (
        lax.fori_loop(0, 2, lambda _, y: jnp.tanh(y), x @ m["v"].T) @ m["w"].T
    ),
    "loop from a constant": lambda m, x: (
        lax.fori_loop(0, 2, lambda i, y: y + x @ m["v"].T + i, jnp.ones((6, 64)))
        @ m["w"].T
    ),
    "branch with a constant": lambda m, x: (
        lax.cond(x[0, 0] > 0, lambda y: y, jnp.ones_like, x @ m["v"].T) @ m["w"].T
    ),
    "convolution": lambda m, x: lax.conv_general_dilated(
        (x @ m["v"].T)[None],
        m["w"][:, :, None],
        (1,),
        "SAME",
        None,
        None,
        ("NWC", "OIW", "NWC"),
    )[0],
    "integers": lambda m, x: (x @ m["v"].T).astype(int) @ m["w"].T,
    "product of elements of weights": lambda m, x: x @ (m["v"] * m["u"]) @ m["w"].T,
    "batched": lambda m, x: (
        jnp.einsum("bi,oi->bio", x @ m["v"].T, m["w"]).sum(1) + (x @ m["v"].T).sum()
    ),
    "odd": lambda m, x: (x @ m["v"].T[:, :63]) @ m["w"][:, :63].T,
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    assert "w" not in folded(KEPT[name])


def test_a_gain_of_another_layer_does_not_move():
    def forward(m, x):
        def step(x, weight):
            return x + (norm(x) * m["gains"][1]) @ weight.T, None

        x, _ = lax.scan(step, m["table"][jnp.arange(6)], m["stack"])
        return norm(x) @ m["w"].T

    assert folded(forward) == {}


@pytest.mark.parametrize("transposed", ["stack", "gains"])
def test_stacks_along_another_axis(transposed):
    model = dict(MODEL)
    model[transposed] = jnp.moveaxis(model[transposed], 0, 1)

    def forward(m, x):
        def step(x, layer):
            weight, gain = layer
            return x + (norm(x) * gain) @ weight.T, x

        layers = m | {transposed: jnp.moveaxis(m[transposed], 1, 0)}
        x = m["table"][jnp.arange(6)]
        x, _ = lax.scan(step, x, (layers["stack"], layers["gains"]))
        return norm(x) @ m["w"].T

    assert folded(forward, model) == {}


def test_a_gain_of_another_loop_does_not_move():
    def forward(m, x):
        def gained(x, gain):
            return x, norm(x) * gain

        x = m["table"][jnp.arange(6)]
        _, all_gained = lax.scan(gained, x, m["gains"])
        step = lambda x, weight: (x, all_gained[0] @ weight.T)
        return lax.scan(step, x, m["stack"])[1].sum(0)

    assert folded(forward) == {}


def test_dtypes_are_kept():
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODEL)
    forward = lambda m, x: (norm(x @ m["v"].T) * m["gain"]) @ m["w"].T
    found = fold_rotations(forward, model, X.astype(jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(found.model)} == {jnp.dtype("bfloat16")}
    # Each weight is rounded once to 8 bits.
    assert found.difference < 2**-6


def test_quantized_weights_stay():
    model = MODEL | {"v": eqquant.quantize(MODEL["v"], "int8")}
    forward = lambda m, x: (x @ m["v"].T) @ m["w"].T
    assert fold_rotations(forward, model, X).rotate == {"*": True}


def test_infinite_results():
    def forward(m, x):
        y = (x @ m["v"].T) @ m["w"].T
        return jnp.where(y > 0, y, -jnp.inf), y

    assert fold_rotations(forward, MODEL, X).difference < 1e-5


def test_other_leaves_stay():
    model = MODEL | {"a": jnp.ones(3, complex), "b": 3, "c": jnp.arange(4)}
    found = fold_rotations(lambda m, x: (x @ m["v"].T) @ m["w"].T, model, X).model
    changed = [key for key in model if found[key] is not model[key]]
    assert changed == ["v", "w"]
    fold_rotations(lambda m, x: x * m["b"], {"b": 3}, X)


def test_errors():
    forward = lambda m, x: x @ m["w"].T
    with pytest.raises(ValueError, match=r"rotate must be True or the number .* False"):
        fold_rotations(forward, MODEL, X, rotate=False)
    with pytest.raises(ValueError, match=r"a power of two of at least 2, got 3"):
        fold_rotations(forward, MODEL, X, rotate=3)
    with pytest.raises(ValueError, match=r"fn must return a floating-point array"):
        fold_rotations(lambda m, x: 1, MODEL, X)
    with pytest.raises(TypeError, match="swapped"):
        fold_rotations(MODEL, lambda m, x: x, X)


def test_a_wrong_result_raises(monkeypatch):
    from eqquant.calibration.bases import _rules

    monkeypatch.setitem(_rules.rules, "tanh", _rules.rules["neg"])
    with pytest.raises(RuntimeError, match="Please report"):
        fold_rotations(lambda m, x: jnp.tanh(x @ m["v"].T) @ m["w"].T, MODEL, X)


def test_rotations_by_path():
    layer = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    rotate = {"layers.0.weight": False, "layers.*": 32}
    q = eqquant.quantize_tree(layer, "nf4", rotate=rotate)
    assert isinstance(q.layers[0].weight, eqquant.QuantizedArray)
    assert q.layers[1].weight.block == 32
    q = eqquant.quantize_tree(layer, "nf4", rotate={"layers.0.weight": True})
    assert isinstance(q.layers[1].weight, eqquant.QuantizedArray)
    with pytest.raises(ValueError, match="rotate must be True, False or the number"):
        eqquant.quantize_tree(layer, "nf4", rotate={"*": 3})


#
# Programs of random operations
#


VECTORS = "gain", "bias"
MATRICES = "v", "u", "w"
OPERATIONS = {
    "product": lambda m, a, b, i: a @ m[MATRICES[i % 2]].T,
    "back": lambda m, a, b, i: a @ m[MATRICES[i % 2]],
    "gain": lambda m, a, b, i: a * m[VECTORS[i % 2]],
    "gain with an offset": lambda m, a, b, i: a * (0.5 + m["gain"]),
    "bias": lambda m, a, b, i: a + m["bias"],
    "norm": lambda m, a, b, i: norm(a),
    "sum": lambda m, a, b, i: a + b,
    "difference": lambda m, a, b, i: a - b / 2,
    "attention": lambda m, a, b, i: jax.nn.softmax(a @ b.T) @ a,
    "rows": lambda m, a, b, i: m["table"][(jnp.arange(6) + i) % 10] + a,
    "heads": lambda m, a, b, i: a.reshape(6, 4, 16)[:, ::-1].reshape(6, 64),
    "halves": lambda m, a, b, i: jnp.concatenate([a[:, 32:], b[:, :32]], -1),
    "mask": lambda m, a, b, i: jnp.where((jnp.arange(6) > i)[:, None], a, b),
    "row by row": lambda m, a, b, i: lax.map(lambda x: 2 * x, a),
    "layers": lambda m, a, b, i: lax.scan(
        lambda x, both: (x + (norm(x) * both[1]) @ both[0].T, None),
        a,
        (m["stack"], m["gains"]),
    )[0],
    "function": lambda m, a, b, i: jnp.tanh(a),
    "gate": lambda m, a, b, i: a * b,
    "mean": lambda m, a, b, i: a - a.mean(-1, keepdims=True),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), *[st.integers(0, 5)] * 3))
)
def test_random_programs(steps):
    """Whatever is folded, results stay: otherwise, `fold_rotations` raises."""

    def forward(m, x):
        values = [m["table"][jnp.arange(6)], x]
        for name, i, j, k in steps:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(OPERATIONS[name](m, a, b, k))
        return values[-1] @ m["w"].T

    fold_rotations(forward, MODEL, X)
