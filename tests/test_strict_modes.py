"""The strict modes of JAX: none of them may fail inside of eqquant."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.kernels import Matmul
from eqquant.primitives._lowering import dot_by, PORTABLE
from helpers import FORMATS


MODES = {
    "rank": lambda: jax.numpy_rank_promotion("raise"),
    "dtype": lambda: jax.numpy_dtype_promotion("strict"),
    "nans": lambda: jax.debug_nans(True),
    "checks": lambda: jax.enable_checks(True),
    "x64": lambda: jax.enable_x64(True),
}
# Rank and dtype concern tracing, so every format is traced. Other modes run.
TRELLIS = eqquant.formats.Trellis(bits=2, block_size=128)
ALL = [*FORMATS, TRELLIS]
TRACED = [(mode, format) for mode in ("rank", "dtype", "x64") for format in ALL]
AFFINE = eqquant.Int3(double_quantization=True, affine=True)
RUN = [("nans", AFFINE), ("checks", eqquant.Int8()), ("x64", eqquant.NF4())]


def everything(x, w, format):
    """Return products, their derivatives, rows and replaced rows of one weight."""
    q = eqquant.quantize(w, format)
    int8 = eqquant.with_compute(q, activations="int8")
    out = [x @ q.T, x[:, :64] @ q, x @ int8.T, jax.vmap(lambda x: q @ x)(x)]
    out += [q.dequantize(), q[jnp.array([1, 2])], q[:4].dequantize()]
    out.append(jax.grad(lambda x: jnp.sum(x @ q.T))(x))
    out.append(jax.grad(lambda w: jnp.sum(eqquant.straight_through(w, format)))(w))
    gradients = jax.grad(lambda q: jnp.sum(x @ q.T), allow_int=True)(q)
    out.append(
        [g for g in jax.tree.leaves(gradients) if jnp.issubdtype(g.dtype, jnp.floating)]
    )
    if not format.has_offsets and not isinstance(q.scales, eqquant.formats.ShortScales):
        for rows, y in ((False, x), (True, x[:, :64])):
            matmul = Matmul(format, rows, q.compute, q.dtype, y.dtype)
            out.append(dot_by(PORTABLE)(y, q.codes, q.scales, matmul=matmul))
    replaced = eqquant.quaxify(lambda q, row: q.at[1].set(row), on_materialise="allow")
    out.append(replaced(q, w[0]).dequantize())
    return out


def operands():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 128)), rng.standard_normal((64, 128))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


@pytest.mark.parametrize("mode, format", TRACED, ids=str)
def test_formats_are_traced(mode, format):
    x, w = operands()
    with MODES[mode]():
        outs = jax.eval_shape(lambda x, w: everything(x, w, format), x, w)
    assert outs[0].shape == (5, 64) and outs[0].dtype == jnp.float32


@pytest.mark.parametrize("mode, format", RUN, ids=str)
def test_formats_run(mode, format):
    x, w = operands()
    expected = jax.jit(lambda x, w: everything(x, w, format))(x, w)
    with MODES[mode]():
        outs = jax.jit(lambda x, w: everything(x, w, format))(x, w)
    np.testing.assert_allclose(outs[0], expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_models(mode):
    model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    x = operands()[0][:, :64]
    forward = lambda model, x: jax.vmap(model)(x)
    with MODES[mode]():
        statistics = eqquant.calibrate(forward, model, [x])
        q = eqquant.quantize_tree(model, "nf4", calibration=statistics, rotate=True)
        adapted = eqquant.lora_tree(q, 4, key=jax.random.key(1))
        layers = eqquant.quantize(jnp.stack([model.layers[0].weight] * 3), "nf4")
        step = lambda x, w: (jnp.tanh(x @ w.T), None)
        carry, _ = jax.lax.scan(eqquant.quaxify(step), x, layers)
        assert jnp.isfinite(forward(q, x)).all() and jnp.isfinite(carry).all()
        assert jnp.isfinite(forward(adapted, x)).all()
