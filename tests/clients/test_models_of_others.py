"""Models of other libraries that use `eqx.nn` run unchanged, without `quaxify`."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, exported


KEY = jax.random.key(0)


def check(model, call, *, format="int8", fewest=0.8):
    """Compare `call(model)` with quantized and with dequantized weights.

    Also compare gradients of the floating-point leaves, and check the quantized share.
    """
    q = eqquant.quantize_tree(model, format)
    rows = eqquant.report(q).rows
    quantized = sum(row.bytes_before for row in rows if row.format is not None)
    assert quantized >= fewest * sum(row.bytes_before for row in rows)
    dense = eqquant.dequantize_tree(q)
    run = eqx.filter_jit(call)
    with jax.default_matmul_precision("highest"):
        expected = run(dense)
        assert_close(run(q), expected, 1e-4)
        assert_close(exported(call, q), expected, 1e-4)
        gradient = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(call(m) ** 2)))
        got, expected = gradient(q), gradient(dense)
    for path, expected_bias in vectors(expected).items():
        assert_close(vectors(got)[path], expected_bias, 1e-3)


def vectors(tree) -> dict:
    """Return arrays with one axis, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(path): x for path, x in leaves if x.ndim == 1}


def test_a_vision_transformer_of_equimo():
    vit = pytest.importorskip("equimo.models.vit")
    options = dict(patch_size=8, num_heads=2, depths=[2], num_classes=10, key=KEY)
    model = vit.VisionTransformer(32, 3, 64, **options)
    image = jax.random.normal(KEY, (3, 32, 32))
    check(model, lambda model: model(image, key=KEY, inference=True))


def test_a_convolutional_network_of_equimo():
    mobilenet = pytest.importorskip("equimo.models.mobilenet")
    model = mobilenet.mobilenetv3_small(num_classes=10, key=KEY)
    model = eqx.nn.inference_mode(model)
    image = jax.random.normal(KEY, (3, 64, 64))
    q = eqquant.quantize_tree(model, "int8")
    dense = eqquant.dequantize_tree(q)
    run = eqx.filter_jit(lambda model: model(image, key=KEY, inference=True))
    with jax.default_matmul_precision("highest"):
        assert_close(run(q), run(dense), 1e-3)


def test_esm2():
    esm2quinox = pytest.importorskip("esm2quinox")
    model = esm2quinox.ESM2(
        num_layers=2, embed_size=64, num_heads=4, token_dropout=False, key=KEY
    )
    tokens = esm2quinox.tokenise(["MKTVRQERLKSIVRILERSKEPVSGAQ"])
    check(model, lambda model: jax.vmap(model)(tokens).logits, format="nf4")


def test_a_flow_of_flowjax():
    flows = pytest.importorskip("flowjax.flows")
    distributions = pytest.importorskip("flowjax.distributions")
    normal = distributions.Normal(jnp.zeros(8))
    flow = flows.coupling_flow(KEY, base_dist=normal, nn_width=64, flow_layers=2)
    x = jax.random.normal(KEY, (5, 8))
    q = eqquant.quantize_tree(flow, "int8")
    assert any(row.format is not None for row in eqquant.report(q).rows)
    dense = eqquant.dequantize_tree(q)
    with jax.default_matmul_precision("highest"):
        run = eqx.filter_jit(lambda flow: flow.log_prob(x))
        assert_close(run(q), run(dense), 1e-3)


def test_a_solver_of_lineax():
    lineax = pytest.importorskip("lineax")
    a = jnp.eye(64) * 8 + jax.random.normal(KEY, (64, 64)) / 8
    q = eqquant.quantize(a, "int8", precision="highest")
    y = jax.random.normal(KEY, (64,))
    operator = lambda w: lineax.FunctionLinearOperator(lambda x: w @ x, y)
    solver = lineax.GMRES(rtol=1e-5, atol=1e-5)
    solve = eqx.filter_jit(lambda w: lineax.linear_solve(operator(w), y, solver).value)
    assert_close(solve(q), solve(q.dequantize()), 1e-3)
