"""`quantize_tree`, `dequantize_tree` and reports."""

import re
import sys
import warnings

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from helpers import assert_close, assert_identical, dense, relative


KEY = jax.random.key(0)


class Everything(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    conv: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose1d
    spectral: eqx.nn.SpectralNorm
    weight_norm: eqx.nn.WeightNorm
    gru: eqx.nn.GRUCell
    lstm: eqx.nn.LSTMCell
    prelu: eqx.nn.PReLU
    attention: eqx.nn.MultiheadAttention
    stacked: eqx.nn.Linear
    stacked_norm: eqx.nn.LayerNorm
    tiny: eqx.nn.Linear
    positions: jax.Array
    name: str = eqx.field(static=True, default="name")

    def __init__(self):
        linear = lambda key=KEY: eqx.nn.Linear(64, 64, key=key)
        self.embedding = eqx.nn.Embedding(100, 64, key=KEY)
        self.layers = [linear(), linear()]
        self.norm = eqx.nn.LayerNorm(64)
        self.conv = eqx.nn.Conv2d(8, 16, 3, key=KEY)
        self.up = eqx.nn.ConvTranspose1d(8, 16, 3, key=KEY)
        self.spectral = eqx.nn.SpectralNorm(linear(), "weight", key=KEY)
        self.weight_norm = eqx.nn.WeightNorm(linear())
        self.gru = eqx.nn.GRUCell(64, 64, key=KEY)
        self.lstm = eqx.nn.LSTMCell(64, 64, key=KEY)
        self.prelu = eqx.nn.PReLU()
        self.attention = eqx.nn.MultiheadAttention(2, 64, key=KEY)
        keys = jax.random.split(KEY, 3)
        self.stacked = eqx.filter_vmap(linear)(keys)
        self.stacked_norm = eqx.filter_vmap(lambda _: eqx.nn.LayerNorm(64))(keys)
        self.tiny = eqx.nn.Linear(4, 4, key=KEY)
        self.positions = jnp.ones((32, 64))


WEIGHTS = {
    "embedding.weight",
    "layers.0.weight",
    "layers.1.weight",
    "conv.weight",
    "up.weight",
    "gru.weight_ih",
    "gru.weight_hh",
    "lstm.weight_ih",
    "lstm.weight_hh",
    "attention.query_proj.weight",
    "attention.key_proj.weight",
    "attention.value_proj.weight",
    "attention.output_proj.weight",
    "stacked.weight",
}


@pytest.fixture(scope="module")
def model():
    return Everything()


def formats_of(tree) -> dict:
    rows = eqquant.report(tree).rows
    return {row.path: row.format for row in rows if row.format is not None}


def test_the_default_choice(model):
    quantized = eqquant.quantize_tree(model)
    assert type(quantized) is Everything and quantized.name == "name"
    assert formats_of(quantized) == dict.fromkeys(WEIGHTS, NF4())
    # All other leaves are the same objects, and nothing was mutated.
    assert quantized.positions is model.positions
    assert quantized.layers[0].bias is model.layers[0].bias
    assert isinstance(model.layers[0].weight, jax.Array)


def test_axes_are_what_the_layer_contracts(model):
    quantized = eqquant.quantize_tree(model, "int8")
    assert quantized.layers[0].weight.scales.shape == (64, 1)
    assert quantized.conv.weight.scales.shape == (16, 1)
    assert quantized.stacked.weight.scales.shape == (3, 64, 1)


def test_wrapped_layers_still_run(model):
    quantized = eqquant.quantize_tree(model)
    x = jnp.ones(64)
    spectral = lambda model: model.spectral(x, eqx.nn.State(model))[0]
    assert_close(spectral(quantized), spectral(model), 0)
    assert_close(quantized.weight_norm(x), model.weight_norm(x), 0)


def test_shared_weights_stay_shared():
    embedding = eqx.nn.Embedding(100, 64, key=KEY)
    head = eqx.nn.Linear(64, 100, key=KEY)
    shared = eqx.nn.Shared(
        (embedding, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight
    )
    quantized = eqquant.quantize_tree(shared, "int8")
    assert len(formats_of(quantized)) == 1
    embedding, head = quantized()
    assert_identical(head.weight, embedding.weight)
    assert relative(head(embedding(3)), dense(head)(dense(embedding)(3))) < 1e-4


def test_dictionaries_as_flax_and_haiku_have_them():
    params = {
        "dense": {"kernel": np.ones((64, 32), np.float32), "bias": np.ones(32)},
        "conv": {"w": jnp.ones((3, 3, 16, 32)), "b": jnp.ones(32)},
        "table": {"embedding": jnp.ones((100, 64))},
        "heads": {"kernel": jnp.ones((64, 4, 16))},
        "norm": {"scale": jnp.ones((64, 64))},
    }
    quantized = eqquant.quantize_tree(params, "int8")
    assert type(quantized) is dict
    assert set(formats_of(quantized)) == {
        "dense.kernel",
        "conv.w",
        "table.embedding",
    }
    assert quantized["dense"]["kernel"].scales.shape == (32, 1)
    assert quantized["conv"]["w"].scales.shape == (32, 1)
    assert quantized["table"]["embedding"].scales.shape == (100, 1)
    reasons = {row.path: row.reason for row in eqquant.report(quantized).rows}
    assert "only a rule can tell" in reasons["heads.kernel"]


def test_what_would_not_get_smaller_stays():
    linear = eqx.nn.Linear(1, 1000, key=KEY)
    with pytest.warns(UserWarning, match="nothing was chosen.*\n.*no smaller as"):
        assert formats_of(eqquant.quantize_tree(linear, "int8")) == {}


def messages_of(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_a_large_part_in_floating_point_is_reported(normal):
    model = {"layer": eqx.nn.Linear(64, 64, key=KEY), "other": normal(64, 40)}
    (message,) = messages_of(lambda: eqquant.quantize_tree(model))
    share = 64 * 40 / (64 * 64 + 64 + 64 * 40)
    assert f"{share:.0%} of the bytes stay in floating point" in message
    assert "other of shape (64, 40): not the weight of a known layer" in message
    # A rule, `where`, and a smaller part are no reason to warn.
    rule = {"other": None}
    assert not messages_of(lambda: eqquant.quantize_tree(model, rules=rule))
    where = lambda leaf: leaf is model["layer"].weight
    assert not messages_of(lambda: eqquant.quantize_tree(model, where=where))
    smaller = {**model, "other": normal(64, 15)}
    assert not messages_of(lambda: eqquant.quantize_tree(smaller))


def test_complex_arrays_stay_in_floating_point(normal):
    model = {"layer": eqx.nn.Linear(64, 64, key=KEY), "z": normal(64, 64) + 0j}
    (message,) = messages_of(lambda: eqquant.quantize_tree(model))
    assert "66% of the bytes" in message and "of dtype complex64" in message


def test_quantized_arrays_are_not_quantized_again(model):
    quantized = eqquant.quantize_tree(model, "nf4")
    again = lambda format: lambda: eqquant.quantize_tree(quantized, format)
    (message,) = messages_of(again("int8"))
    assert f"{len(WEIGHTS)} arrays are quantized already and are skipped" in message
    assert "in NF4(block_size=64)" in message and "dequantize_tree" in message
    assert not messages_of(again("nf4"))
    some = eqquant.quantize_tree(model, None, rules={"layers.0.weight": "int8"})
    rules = {"layers.0.weight": None}
    assert not messages_of(lambda: eqquant.quantize_tree(some, "nf4", rules=rules))


@pytest.mark.parametrize(
    "shape, axes", [((64, 32, 3, 3), (1, 2, 3)), ((3, 3, 32, 64), (0, 1, 2))]
)
def test_advice_names_axes(shape, axes, normal):
    model = {"kernels": normal(*shape)}
    (message,) = messages_of(lambda: eqquant.quantize_tree(model))
    assert f"rules={{'kernels': ('int8', {axes})}}" in message
    rules = {"kernels": ("int8", axes)}
    assert not messages_of(lambda: eqquant.quantize_tree(model, rules=rules))


def test_a_rule_that_enlarges_an_array_is_reported(normal):
    model = {"kernels": normal(64, 32, 3, 3)}
    rules = {"kernels": "nf4"}
    (message,) = messages_of(lambda: eqquant.quantize_tree(model, rules=rules))
    before, after = 64 * 32 * 9 * 4, 64 * 32 * 3 * 36
    assert f"{before:,} bytes become {after:,} as NF4" in message
    assert "rows along axis -1 have 3 values" in message
    assert "probably (1, 2, 3): `rules={'kernels': ('nf4', (1, 2, 3))}`" in message


#
# Selection
#


def test_where_is_a_function(model):
    square = lambda x: eqx.is_array(x) and x.shape == (64, 64)
    paths = set(formats_of(eqquant.quantize_tree(model, "int8", where=square)))
    assert "layers.0.weight" in paths and "gru.weight_hh" not in paths


def test_where_is_a_pytree_prefix(model):
    mask = jax.tree.map(lambda _: False, model)
    mask = eqx.tree_at(lambda m: m.conv.weight, mask, True)
    assert set(formats_of(eqquant.quantize_tree(model, where=mask))) == {"conv.weight"}
    quantized = eqquant.quantize_tree(model.layers, where=[eqx.is_array, False])
    assert set(formats_of(quantized)) == {"0.weight", "0.bias"}
    with pytest.raises(TypeError, match=r"where must be.*1\.5"):
        eqquant.quantize_tree(model.layers, where=[1.5, False])


def test_the_first_rule_that_matches_wins(model):
    rules = {
        "layers.0.*": "int8",
        "layers.*": Ternary(block_size=32),
        re.compile(r"gru\.weight_(ih|hh)"): None,
        "attention.query*": ("binary", 0),
        "attention.*": eqquant.trees.QuantizationRule(NF4(block_size=32)),
        "positions": "int8",
        "embedding.weight": None,
    }
    found = formats_of(eqquant.quantize_tree(model, "nf4", rules=rules))
    assert found["layers.0.weight"] == Int8()
    assert found["layers.1.weight"] == Ternary(block_size=32)
    assert found["attention.query_proj.weight"] == Binary()
    assert found["attention.value_proj.weight"] == NF4(block_size=32)
    assert found["positions"] == Int8()
    assert found["stacked.weight"] == NF4()
    assert not {"gru.weight_ih", "embedding.weight", "layers.0.bias"} & set(found)
    query = eqquant.quantize_tree(model, rules=rules).attention.query_proj.weight
    assert query.blocked_axes == (0,)


def test_only_rules(model):
    found = formats_of(eqquant.quantize_tree(model, None, rules={"layers.1.*": "nf4"}))
    assert found == {"layers.1.weight": NF4()}


def test_a_wildcard_leaves_biases_and_norms_alone(model):
    found = set(formats_of(eqquant.quantize_tree(model, rules={"*": "int8"})))
    assert found == WEIGHTS | {"tiny.weight", "positions"}
    exact = eqquant.quantize_tree(model, None, rules={"layers.0.bias": "int8"})
    assert set(formats_of(exact)) == {"layers.0.bias"}


def test_unused_rules_are_reported(model):
    with pytest.warns(UserWarning, match=r"match nothing: \['foo\.\*'\]") as caught:
        eqquant.quantize_tree(model.layers, rules={"0.*": "int8", "foo.*": "nf4"})
    assert caught[0].filename == __file__


def test_bad_arguments(model):
    with pytest.raises(ValueError, match="format is 'fp3', but must be .*'nf3'"):
        eqquant.quantize_tree(model, "fp3")
    with pytest.raises(ValueError, match="format is 'fp3', but must be .*'nf3'"):
        eqquant.quantize_tree(model, rules={"*": "fp3"})
    with pytest.raises(TypeError, match="rules"):
        eqquant.quantize_tree(model, rules={3: "nf4"})
    broken = eqx.tree_at(
        lambda m: m[0].weight, model.layers, jnp.full((64, 64), jnp.nan)
    )
    with pytest.raises(ValueError, match=r"at 0\.weight:.*4096 values are NaN"):
        eqquant.quantize_tree(broken)
    with pytest.raises(ValueError, match=r"at layers\.0\.weight: axis must"):
        eqquant.quantize_tree(model, rules={"layers.0.weight": ("int8", 7)})


#
# Options
#


def test_abstractly_and_under_jit(model):
    expected = eqquant.quantize_tree(model, "nf4")
    skeleton = eqx.filter_eval_shape(eqquant.quantize_tree, model, "nf4")
    assert jax.tree.structure(skeleton) == jax.tree.structure(expected)
    assert eqquant.trees.nbytes(skeleton) == eqquant.trees.nbytes(expected)
    compiled = eqx.filter_jit(eqquant.quantize_tree)(model, "nf4")
    assert_identical(
        eqx.filter(compiled, eqx.is_array), eqx.filter(expected, eqx.is_array)
    )


def test_quantizing_twice_changes_nothing(model):
    once = eqquant.quantize_tree(model, "nf4")
    assert eqx.tree_equal(eqquant.quantize_tree(once, "int8"), once) is not False
    assert formats_of(eqquant.quantize_tree(once, "int8")) == formats_of(once)


def test_leaves_are_quantized_one_at_a_time(monkeypatch):
    """Lazy leaves are in memory one at a time."""
    import eqquant.trees._quantize as module

    live = []

    def counting(array, *args, **kwargs):
        out = eqquant.quantize(array, *args, **kwargs)
        live.append(sum(x.nbytes for x in jax.live_arrays() if x.dtype == jnp.float32))
        return out

    monkeypatch.setattr(module, "quantize", counting)
    before = sum(x.nbytes for x in jax.live_arrays() if x.dtype == jnp.float32)
    tree = {str(i): {"kernel": np.ones((512, 512), np.float32)} for i in range(8)}
    eqquant.quantize_tree(tree, "int8")
    # Scales, and at most one leaf as a JAX array.
    assert max(live) - before <= 2 * 512 * 512 * 4


def test_dequantize_tree_and_is_quantized(model):
    quantized = eqquant.quantize_tree(model, "int8")
    back = eqquant.dequantize_tree(quantized)
    assert jax.tree.structure(back) == jax.tree.structure(model)
    assert relative(back.layers[0].weight, model.layers[0].weight) < 0.01
    assert eqquant.is_quantized(quantized.layers[0].weight)
    assert not eqquant.is_quantized(model.layers[0].weight)


def test_an_optimiser_step_leaves_quantized_arrays_alone(default_format):
    model = eqx.nn.MLP(64, 8, 64, 2, key=KEY)
    model = eqquant.quantize_tree(model, default_format)
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    assert all(x.ndim == 1 for x in jax.tree.leaves(trainable))

    def loss(trainable, x):
        return jnp.sum(jax.vmap(eqx.combine(trainable, frozen))(x) ** 2)

    optimiser = optax.adamw(0.1, weight_decay=0.1)
    state = optimiser.init(trainable)
    grads = eqx.filter_jit(jax.grad(loss))(trainable, jnp.ones((4, 64)))
    updates, _ = optimiser.update(grads, state, trainable)
    after = eqx.combine(eqx.apply_updates(trainable, updates), frozen)
    for old, new in zip(model.layers, after.layers, strict=True):
        assert_identical(new.weight, old.weight)
        assert (new.bias != old.bias).any()


def test_nbytes(model):
    assert eqquant.trees.nbytes({"a": jnp.ones(3), "b": np.ones(2), "c": "text"}) == 28
    total = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    assert eqquant.trees.nbytes(model) == total


#
# The report
#


def test_the_error_of_results():
    model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
    q = eqquant.quantize_tree(model, "int8")
    fn = lambda model, x: jax.vmap(model)(x)
    batches = [jax.random.normal(jax.random.key(i), (4, 64)) for i in (1, 2)]
    report = eqquant.report(q, model, fn=fn, batches=batches)
    x = jnp.concatenate(batches)
    expected = relative(fn(q, x), fn(model, x))
    assert abs(report.results_error - expected) < 1e-3 * expected
    assert f"results: {report.results_error:.4f}" in str(report)
    with pytest.raises(ValueError, match="at least one batch"):
        eqquant.report(q, model, fn=fn, batches=[])
    with pytest.raises(ValueError, match="fn requires batches and original"):
        eqquant.report(q, fn=fn, batches=batches)


def test_report(model):
    quantized = eqquant.quantize_tree(model, "nf4", rules={"layers.0.*": None})
    report = eqquant.report(quantized, model)
    rows = {row.path: row for row in report.rows}
    row = rows["layers.1.weight"]
    weight = model.layers[1].weight
    error = relative(quantized.layers[1].weight.dequantize(), weight)
    assert row.shape == (64, 64) and row.format == NF4() and row.bits == 4.5
    assert (row.bytes_before, row.bytes_after) == (64 * 64 * 4, 64 * 36)
    assert row.reason == ""
    assert row.relative_error == pytest.approx(error, rel=1e-5)
    assert row.sqnr == pytest.approx(-20 * np.log10(error), abs=1e-3)
    assert rows["layers.0.weight"].reason == "not selected"
    assert rows["tiny.weight"].reason == "smaller than 256"
    assert rows["spectral.layer.weight"].reason == "computed anew at each call"
    assert rows["norm.bias"].reason == "a bias"
    assert rows["norm.weight"].reason == "of one axis"
    floats = eqx.filter(model, eqx.is_inexact_array)
    assert report.bytes_before == eqquant.trees.nbytes(floats)
    after = eqx.filter(quantized, eqx.is_array)
    assert report.bytes_after == eqquant.trees.nbytes(after)
    lines = str(report).splitlines()
    assert len(lines) < len(report.rows) + 4  # Similar rows are merged.
    assert any("layers.1.weight" in line and "nf4" in line for line in lines)
    assert "smaller" in lines[-1]


def test_report_of_something_else(model):
    with pytest.raises(ValueError, match="must be the pytree that was quantized"):
        eqquant.report(eqquant.quantize_tree(model), model.layers)


#
# Other dtypes
#


@pytest.mark.parametrize("format", ["nf4", "int8", NF4(double_quantization=True)])
def test_a_cast_keeps_codes_and_scales(format):
    mlp = eqx.nn.MLP(64, 64, 64, 1, key=KEY)
    mlp = jax.tree.map(lambda a: 1e-9 * a if eqx.is_array(a) else a, mlp)
    quantized = eqquant.quantize_tree({"mlp": mlp, "steps": jnp.arange(3)}, format)
    half = eqquant.cast_tree(quantized, jnp.float16)
    weight = half["mlp"].layers[0].weight
    assert weight.dtype == half["mlp"].layers[0].bias.dtype == jnp.float16
    assert half["steps"].dtype == jnp.int32
    back = eqquant.cast_tree(half, "float32")["mlp"].layers[0].weight
    assert_identical(back, quantized["mlp"].layers[0].weight)
    with pytest.raises(TypeError, match="cast_tree: dtype is 'int8', but must be a fl"):
        eqquant.cast_tree(quantized, "int8")


#
# The progress bar
#


def test_progress(model, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    eqquant.quantize_tree(model.layers, progress=True)
    assert "quantizing: 100%" in capsys.readouterr().err
    eqquant.quantize_tree(model.layers)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    eqquant.quantize_tree(model.layers)
    with pytest.raises(ImportError, match=r"pip install eqquant\[progress\]"):
        eqquant.quantize_tree(model.layers, progress=True)
