"""Models of other libraries: `quantize_tree` selects their weights, and they run."""

import pathlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, exported


KEY = jax.random.key(0)


def chosen(tree) -> set[str]:
    return {row.path for row in eqquant.report(tree).rows if row.format is not None}


def check(fn, params, *args, tolerance=1e-4):
    """Compare `fn(params, *args)` with quantized and with dequantized weights."""
    run = eqquant.quaxify(fn, on_materialise="error")
    expected = fn(eqquant.dequantize_tree(params), *args)
    assert_close(run(params, *args), expected, tolerance)
    assert_close(jax.jit(run)(params, *args), expected, tolerance)
    assert_close(exported(run, params, *args), expected, tolerance)


def test_linen():
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(50, 64)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(x, x)
            x = nn.DenseGeneral((4, 24))(nn.LayerNorm()(x))
            x = nn.DenseGeneral(64, axis=(-2, -1))(nn.relu(x))
            return nn.Conv(32, (3,))(x)

    tokens = jax.random.randint(KEY, (2, 7), 0, 50)
    model = Model()
    params = eqquant.quantize_tree(model.init(KEY, tokens), "int8")
    names = ("query", "key", "value", "out")
    attention = "params.MultiHeadDotProductAttention_0"
    assert chosen(params) == {
        "params.Embed_0.embedding",
        "params.DenseGeneral_0.kernel",
        "params.DenseGeneral_1.kernel",
        "params.Conv_0.kernel",
        *(f"{attention}.{name}.kernel" for name in names),
    }
    check(model.apply, params, tokens)


def test_flax_error_equals_the_documented_error():
    nn = pytest.importorskip("flax.linen")
    page = pathlib.Path(__file__).parents[2] / "docs" / "when-it-does-not-run.md"
    model, x = nn.Dense(64), jax.random.normal(KEY, (8, 256))
    params = eqquant.quantize_tree(model.init(KEY, x), "int8")
    with pytest.raises(Exception, match="initializer") as caught:
        model.apply(params, x)
    assert f"flax.errors.{caught.type.__name__}: {caught.value}" in page.read_text()
    check(model.apply, params, x)


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 128, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.down = nnx.Linear(128, 64, rngs=rngs)

        def __call__(self, x):
            return self.attention(self.down(nnx.relu(self.up(x))))

    model, x = Model(nnx.Rngs(0)), jax.random.normal(KEY, (2, 5, 64))
    q = eqquant.quantize_tree(model, "int8")
    assert type(q) is Model
    names = ("query", "key", "value", "out")
    assert chosen(q) == {
        "up.kernel.value",
        "down.kernel.value",
        *(f"attention.{name}.kernel.value" for name in names),
    }
    check(lambda model, x: model(x), q, x)
    graph, state = nnx.split(model)
    state = eqquant.quantize_tree(state, "int8")
    assert chosen(state) == chosen(q)
    check(lambda state, x: nnx.merge(graph, state)(x), state, x)


def test_haiku():
    hk = pytest.importorskip("haiku")

    def forward(x):
        x = hk.Conv2D(8, 3)(x)
        return hk.nets.MLP([64, 32])(
            hk.LayerNorm(-1, True, True)(x).reshape(len(x), -1)
        )

    model = hk.without_apply_rng(hk.transform(forward))
    x = jax.random.normal(KEY, (2, 8, 8, 4))
    params = eqquant.quantize_tree(model.init(KEY, x), "int8")
    layers = ("conv2_d", "mlp/~/linear_0", "mlp/~/linear_1")
    assert chosen(params) == {f"{layer}.w" for layer in layers}
    check(model.apply, params, x)


def test_stax():
    from jax.example_libraries import stax

    layers = (stax.Conv(8, (3, 3)), stax.Relu, stax.Flatten, stax.Dense(32))
    init, apply = stax.serial(*layers)
    _, params = init(KEY, (2, 8, 8, 4))
    params = eqquant.quantize_tree(params, "int8")
    assert chosen(params) == {"0.0", "3.0"}
    check(apply, params, jax.random.normal(KEY, (2, 8, 8, 4)))


def test_haliax():
    """Weights in named arrays are selected, and products do not decode them."""
    hax = haliax()
    sizes = {"embed": 64, "mlp": 128, "vocab": 50, "heads": 4, "size": 16, "batch": 5}
    embed, mlp, vocab, heads, size, batch = (hax.Axis(*item) for item in sizes.items())
    model = {
        "table": hax.nn.Embedding.init(vocab, embed, key=KEY),
        "up": hax.nn.Linear.init(embed, mlp, key=KEY),
        "heads": hax.nn.Linear.init(embed, (heads, size), key=KEY),
        "mlp": hax.nn.MLP.init(embed, embed, 96, 2, key=KEY),
        "norm": hax.nn.LayerNorm.init(embed),
    }
    q = eqquant.quantize_tree(model, "int8")
    layers = [f"mlp.layers.{i}" for i in range(3)]
    assert chosen(q) == {
        f"{layer}.weight.array" for layer in ("table", "up", "heads", *layers)
    }
    assert q["up"].weight.array.axes == (-2,) and q["table"].weight.array.axes == (-1,)
    scaled = eqquant.quaxify(lambda w: w * 1.0, on_materialise="error")(q["up"].weight)
    assert isinstance(scaled.array, eqquant.QuantizedArray)
    x = hax.named(jax.random.normal(KEY, (5, 64)), (batch, embed))
    for name in ("up", "heads", "mlp"):
        check(lambda model, x, name=name: model[name](x), q, x)


def haliax():
    """Import Haliax with replacements for removed parts of JAX.

    Haliax 1.3, the newest version, uses a private class for annotations, a check for
    symbolic shapes, and internal parts of `jnp.einsum`, which the replacement calls as
    a whole.
    """
    from jax._src import tree_util

    if not hasattr(tree_util, "BuiltInKeyEntry"):
        tree_util.BuiltInKeyEntry = object
    hax = pytest.importorskip("haliax", exc_type=ImportError)
    dot = pytest.importorskip("haliax._src.dot", exc_type=ImportError)

    def einsum(spec, *operands, _dot_general=None, **options):
        return jnp.einsum(spec, *operands, **options)

    dot._jittable_dg_einsum = einsum
    return hax


def test_paramax():
    paramax = pytest.importorskip("paramax")
    linear = eqx.nn.Linear(64, 32, key=KEY)
    weight = lambda m: m.weight
    frozen = eqx.tree_at(weight, linear, paramax.NonTrainable(linear.weight))
    q = eqquant.quantize_tree(frozen, "int8")
    assert chosen(q) == {"weight.tree"}
    x = jax.random.normal(KEY, (64,))
    check(lambda model, x: paramax.unwrap(model)(x), q, x)
    normalised = eqx.tree_at(weight, linear, paramax.WeightNormalization(linear.weight))
    with pytest.warns(UserWarning, match="computed anew at each call"):
        assert chosen(eqquant.quantize_tree(normalised)) == set()
