"""More libraries of the Equinox family: each model against its dequantized self."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close


KEY = jax.random.key(0)


def check(model, call, *, fewest=0.0, tolerance=1e-3, run=lambda call: call, **options):
    """Compare quantized with dequantized weights, and check the quantized share."""
    q = eqquant.quantize_tree(model, options.pop("format", "int8"), **options)
    rows = eqquant.report(q).rows
    quantized = sum(row.bytes_before for row in rows if row.format is not None)
    assert quantized > fewest * sum(row.bytes_before for row in rows)
    with jax.default_matmul_precision("highest"):
        expected = eqx.filter_jit(call)(eqquant.dequantize_tree(q))
        assert_close(eqx.filter_jit(run(call))(q), expected, tolerance)


def test_charges_of_expaloma():
    """A graph network with its real weights, which are plain arrays."""
    expaloma = pytest.importorskip("expaloma")
    model = expaloma.load_eqx(expaloma.bundled_eqx_path())
    units = model.gnn.w_f_in.shape[1]
    x = jax.random.bernoulli(KEY, 0.1, (6, units)).astype(jnp.float32)
    ring = jnp.arange(6)
    senders = jnp.concatenate([ring, (ring + 1) % 6])
    receivers = jnp.concatenate([(ring + 1) % 6, ring])
    graph = x, senders, receivers, jnp.zeros(6, jnp.int32)
    call = lambda model: model(*graph, 1, 0.0)
    run = lambda call: eqquant.quaxify(call, on_materialise="error")
    rules = {"*.w_*": eqquant.trees.QuantizationRule("int8", axis=-1), "*": None}
    check(model, call, fewest=0.9, rules=rules, run=run)


def test_a_root_of_optimistix():
    """The implicit derivative of a fixed point with quantized weights."""
    optimistix = pytest.importorskip("optimistix")
    layer = eqx.nn.Linear(32, 32, key=KEY)
    x = jax.random.normal(KEY, (32,))
    step = lambda y, args: jnp.tanh(args[0](y)) / 4 + args[1]
    solver = optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6)

    def solve(layer):
        return optimistix.fixed_point(step, solver, jnp.zeros(32), (layer, x)).value

    check(layer, solve, fewest=0.9)
