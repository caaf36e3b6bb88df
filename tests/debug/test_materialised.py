"""Tests of `assert_not_materialised`."""

import functools as ft

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.debug._flow import Flow, TrackedWeight
from eqquant.debug._in_hlo import decoded_in_hlo
from eqquant.debug._inspect import materialised
from eqquant.primitives import _lowering
from helpers import pairs
from jax import lax
from jax.experimental import pallas as pl


ROWS, COLUMNS = 64, 64


@pytest.fixture
def w(normal):
    return eqquant.quantize(normal(ROWS, COLUMNS), "nf4")


@pytest.fixture
def stack(normal):
    return eqquant.quantize(normal(3, ROWS, COLUMNS), "nf4")


@pytest.fixture(params=[lambda fn: fn, jax.jit], ids=["eager", "jit"])
def transform(request):
    return request.param


def passes(fn, *args):
    eqquant.debug.assert_not_materialised(fn, *args)


def fails(fn, *args) -> list[str]:
    found = materialised(fn, *args)
    assert found
    assert len(found) == len(set(found))
    return found


def test_decoding_raises(w, transform, normal):
    for fn in (
        lambda x, w: x @ w.dequantize().T,
        lambda x, w: jnp.sum(w.dequantize()),
        lambda x, w: w.dequantize().astype("bfloat16"),
        lambda x, w: jnp.where(x[0] > 0, w.dequantize(), 0),
    ):
        with pytest.raises(eqquant.MaterialiseError, match=r"float32\[64,"):
            eqquant.debug.assert_not_materialised(transform(fn), normal(5, COLUMNS), w)


def test_jaxpr_and_compiled_program_are_checked(w, normal):
    found = materialised(lambda x, w: x @ w.dequantize().T, normal(5, COLUMNS), w)
    assert any("mul -> float32[64" in line for line in found)
    assert any(line.startswith("compiled: ") for line in found)


@pairs("format, precision", ["nf4", "int8", "binary"], ["high", "highest", "default"])
def test_an_activation_as_large_as_a_weight(format, precision, transform, normal):
    q = eqquant.quantize(normal(ROWS, COLUMNS), format)
    x = normal(ROWS, COLUMNS)

    def model(x, q):
        with jax.default_matmul_precision(precision):
            return jnp.tanh(jax.nn.relu(x @ q.T) @ q + x)

    passes(transform(model), x, q)
    passes(transform(jax.grad(lambda x, q: jnp.sum(model(x, q)))), x, q)


def test_closed_over_weights(w, normal):
    x = normal(ROWS, COLUMNS)
    passes(lambda x: x @ w.T, x)
    fails(lambda x: x @ w.dequantize().T, x)
    # In a nested jitted function.
    inner = jax.jit(lambda x: x * w.dequantize())
    fails(lambda x: inner(x), x)


def test_codes_outside_of_their_array(w, normal):
    rebuild = lambda codes, scales: w.replace(codes=codes, scales=scales)
    x = normal(ROWS, COLUMNS)
    passes(lambda x, c, s, w: x @ rebuild(c, s).T, x, w.codes, w.scales, w)
    fails(lambda x, c, s, w: x @ rebuild(c, s).dequantize(), x, w.codes, w.scales, w)


def test_scan_over_a_stack(stack, normal):
    x = normal(ROWS, COLUMNS)
    good = lambda x, stack: lax.scan(lambda x, w: (x @ w.T, None), x, stack)[0]
    bad = lambda x, stack: lax.scan(
        lambda x, w: (x @ w.dequantize().T, None), x, stack
    )[0]
    passes(good, x, stack)
    passes(jax.grad(lambda x, stack: jnp.sum(good(x, stack))), x, stack)
    found = fails(bad, x, stack)  # One matrix at a time.
    assert any("scan/" in line and "[64,64]" in line for line in found)
    # Decoded rows become a whole stack.
    assert any("[3,64,64]" in line for line in fails(decode_by_rows, stack))


def decode_by_rows(stack):
    rows = lambda w: lax.map(lambda i: w[i], jnp.arange(ROWS))
    return lax.map(rows, stack)


def test_one_matrix_of_a_stack(stack, normal):
    x, i = normal(ROWS, COLUMNS), jnp.array(1)
    passes(lambda x, stack, i: x @ stack[i].T, x, stack, i)
    fails(lambda x, stack, i: x @ stack[i].dequantize().T, x, stack, i)
    chosen = lambda x, stack, i: x @ stack[i[None]].dequantize()[0].T
    fails(chosen, x, stack, i)


def test_vmap(stack, w, normal):
    x = normal(3, ROWS, COLUMNS)
    passes(jax.vmap(lambda x, w: x @ w.T), x, stack)
    passes(jax.vmap(lambda x, w: x @ w.T, in_axes=(0, None)), x, w)
    fails(jax.vmap(lambda x, w: x @ w.dequantize().T), x, stack)


@jax.custom_vjp
def product(x, w):
    return x @ w.T


product.defvjp(lambda x, w: (product(x, w), w), lambda w, ct: (ct @ w, None))


@jax.custom_vjp
def decoding(x, w):
    return x @ w.T


decoding.defvjp(
    lambda x, w: (decoding(x, w), w), lambda w, ct: (ct @ w.dequantize(), None)
)


@jax.custom_jvp
def tangent(x, w):
    return x * jnp.sum(x @ w.T)


tangent.defjvp(lambda p, t: (tangent(*p), t[0] * p[1].dequantize()))


def test_custom_derivatives(w, normal):
    x = normal(ROWS, COLUMNS)
    gradient = lambda fn: jax.grad(lambda x, w: jnp.sum(fn(x, w)))
    passes(product, x, w)
    passes(gradient(product), x, w)
    passes(decoding, x, w)
    fails(gradient(decoding), x, w)
    passes(tangent, x, w)
    fails(lambda x, w: jax.jvp(lambda x: tangent(x, w), (x,), (x,))[1], x, w)


def test_the_gradient_of_scales(w, normal):
    x = normal(ROWS, COLUMNS)
    loss = lambda s, w, x: jnp.sum(jnp.sin(x @ w.replace(scales=s).T))
    passes(lambda w, x: jax.grad(loss)(w.scales, w, x), w, x)
    dense = lambda s, w, x: jnp.sum(x @ w.replace(scales=s).dequantize())
    fails(lambda w, x: jax.grad(dense)(w.scales, w, x), w, x)


def test_materialising_rules(w, normal):
    x = normal(5, COLUMNS)
    fn = eqquant.quaxify(lambda x, w: x @ jnp.sin(w).T, on_materialise="allow")
    fails(fn, x, w)
    passes(eqquant.quaxify(lambda x, w: x @ w.T), x, w)


def test_while_loops(w, transform, normal):
    x = normal(5, COLUMNS)

    def whole(x, w):
        step = lambda carry: (carry[0] + 1, carry[1] + x @ w.dequantize().T)
        return lax.while_loop(lambda carry: carry[0] < 3, step, (0, x @ w.T))[1]

    found = fails(transform(whole), x, w)
    assert any("while/" in line for line in found)
    if transform is jax.jit:
        return

    def row_by_row(w):
        """Each step writes one decoded row into the same array."""
        step = lambda i, out: out.at[i].set(w[i])
        return lax.fori_loop(0, ROWS, step, jnp.zeros((ROWS, COLUMNS)))

    fails(row_by_row, w)

    def one_step_later(x, w):
        """Decode codes that the previous step stored in the carry."""
        zeros = jnp.zeros_like(w.codes)

        def step(_, carry):
            codes, out = carry
            return w.codes, out + w.replace(codes=codes).dequantize()

        return lax.fori_loop(0, 3, step, (zeros, x))[1]

    fails(one_step_later, jnp.zeros((ROWS, COLUMNS)), w)


def test_branches_and_remat(w, normal):
    x = normal(ROWS, COLUMNS)
    good, bad = (lambda x, w: x @ w.T), (lambda x, w: x @ w.dequantize().T)
    choose = lambda second: lambda x, w: lax.cond(x[0, 0] > 0, good, second, x, w)
    passes(choose(good), x, w)
    fails(choose(bad), x, w)
    passes(jax.checkpoint(good), x, w)
    fails(jax.checkpoint(bad), x, w)


def test_a_linear_solver(w, normal):
    """Only its primitive defines the inputs of its jaxprs."""
    b = normal(ROWS)
    solve = lambda fn: jax.scipy.sparse.linalg.cg(fn, b, maxiter=2)[0]
    passes(lambda w: solve(lambda x: x + w @ x), w)
    fails(lambda w: solve(lambda x: x + w.dequantize() @ x), w)


def test_several_devices(normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    q = eqquant.quantize(normal(ROWS, COLUMNS), "int8")
    x = normal(ROWS, COLUMNS)
    over = ft.partial(jax.shard_map, mesh=mesh, in_specs=(spec("x"), spec()))
    passes(over(lambda x, q: x @ q.T, out_specs=spec("x")), x, q)
    fails(over(lambda x, q: x @ q.dequantize().T, out_specs=spec("x")), x, q)


def test_an_embedding(w, normal):
    """A lookup may return as many rows as the table has."""
    tokens = jnp.arange(ROWS)
    layer = eqx.nn.Embedding(ROWS, COLUMNS, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, w)
    passes(lambda layer, tokens: jax.vmap(layer)(tokens), layer, tokens)
    passes(lambda layer: jax.vmap(layer)(tokens), layer)
    fails(lambda layer: jax.vmap(layer)(jnp.arange(ROWS)), layer)


def test_position_embeddings(w, normal):
    """A slice of the table may be added to activations of the table's size."""
    x = normal(8, 8, COLUMNS)
    passes(lambda x, w: jnp.tanh(x + dense(w[:8])), x, w)
    passes(lambda x, w: jnp.tanh(x + dense(w[jnp.arange(8)])), x, w)
    fails(lambda x, w: x + dense(w[jnp.arange(ROWS)]).reshape(x.shape), x, w)


def test_concatenated_parts(w, normal):
    halves = lambda w: [w[: ROWS // 2], w[ROWS // 2 :]]
    whole = lambda join: lambda w: join([jnp.sin(dense(h)) for h in halves(w)])
    passes(whole(lambda parts: [jnp.sum(part) for part in parts]), w)
    fails(whole(jnp.concatenate), w)
    pad = lambda a, before: jnp.pad(a, ((before, ROWS // 2 - before), (0, 0)))
    fails(whole(lambda parts: pad(parts[0], 0) + pad(parts[1], ROWS // 2)), w)


def dense(x):
    return eqquant.dequantize(x) if eqquant.is_quantized(x) else x


def test_two_concatenated_weights(w, normal):
    other = eqquant.quantize(normal(32, COLUMNS), "nf4")
    concatenate = eqquant.quaxify(
        lambda w, v: jnp.sin(jnp.concatenate([w, v])), on_materialise="allow"
    )
    fails(concatenate, w, other)


def test_padding_counts(normal):
    q = eqquant.quantize(normal(ROWS, 50), "nf4")
    fails(lambda q: q.replace(padding=0).dequantize(), q)
    passes(lambda x, q: x @ q.T, normal(ROWS, 50), q)


def test_kernels(w, normal):
    """A kernel decodes if it has no activation as an operand."""
    shape = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    call = ft.partial(pl.pallas_call, out_shape=shape, interpret=True)

    def decode(codes, out):
        out[...] = jnp.concatenate([codes[...].astype(jnp.float32)] * 2, 1)

    def multiply(x, codes, out):
        halves = codes[...].astype(jnp.float32)
        out[...] = x[...] @ jnp.concatenate([halves] * 2, 1)

    x = normal(ROWS, COLUMNS)
    traced = lambda fn, *args: [
        line for line in materialised(fn, *args) if "compiled" not in line
    ]
    assert traced(lambda w: call(decode)(w.codes), w)
    assert not traced(lambda x, w: call(multiply)(x, w.codes), x, w)


def test_lowerings_that_decode(w, normal, monkeypatch):

    def decodes(x, codes, scales, offsets, view, *, matmul):
        return x @ w.replace(codes=codes, scales=scales).dequantize().T

    def slices(x, codes, scales, offsets, view, *, matmul):
        return x[:, :COLUMNS] @ jnp.ones((COLUMNS, codes.shape[0]))

    x = normal(ROWS, COLUMNS)
    for dot, expected in ((decodes, True), (slices, False)):
        monkeypatch.setattr(_lowering, "dot_by", lambda tiers, dot=dot: dot)
        lines = materialised(lambda x, w: x @ w.T, x, w)
        assert any("quantized_dot/" in line for line in lines) == expected


PROGRAM = """
HloModule jit_f, is_scheduled=true

%decoded (p.0: u8[64,32], p.1: f32[64,64]) -> f32[64,64] {
  %p.0 = u8[64,32]{1,0} parameter(0)
  %p.1 = f32[64,64]{1,0} parameter(1)
  %wide = u8[64,64]{1,0} broadcast(%p.0), dimensions={0,1}
  %floats = f32[64,64]{1,0} convert(%wide), metadata={op_name="a (b"}
  ROOT %result = f32[64,64]{1,0} LAST(%p.1, %floats)
}

%body (arg: (s32[], u8[64,32], f32[64,64])) -> (s32[], u8[64,32], f32[64,64]) {
  %arg = (s32[], u8[64,32]{1,0}, /*index=2*/f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %codes = u8[64,32]{1,0} get-tuple-element(%arg), index=1
  %x = f32[64,64]{1,0} get-tuple-element(%arg), index=2
  %next = f32[64,64]{1,0} fusion(%codes, %x), kind=kLoop, calls=%decoded
  ROOT %out = (s32[], u8[64,32]{1,0}, f32[64,64]{1,0}) tuple(%i, %codes, %next)
}

%go (arg.1: (s32[], u8[64,32], f32[64,64])) -> pred[] {
  %arg.1 = (s32[], u8[64,32]{1,0}, f32[64,64]{1,0}) parameter(0)
  ROOT %false = pred[] constant(false)
}

ENTRY %main (q: u8[64,32], x.1: f32[64,64]) -> f32[64,64] {
  %q = u8[64,32]{1,0} parameter(0)
  %x.1 = f32[64,64]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], u8[64,32]{1,0}, f32[64,64]{1,0}) tuple(%zero, %q, %x.1)
  %loop = (s32[], u8[64,32], f32[64,64]) while(%start), condition=%go, body=%body
  ROOT %end = f32[64,64]{1,0} get-tuple-element(%loop), index=2
}
"""


def test_a_compiled_program():
    size = ROWS * COLUMNS
    weight = TrackedWeight(size, size, 2, frozenset({size}))
    flows = [Flow({weight: size}), Flow(data=True)]
    found = decoded_in_hlo(PROGRAM.replace("LAST", "add"), flows)
    assert "compiled: fusion -> f32[64,64]" in found
    # The fusion decodes the weight, but not in memory.
    assert not decoded_in_hlo(PROGRAM.replace("LAST", "dot"), flows)
    # A kernel with an activation as an operand multiplies.
    assert not decoded_in_hlo(PROGRAM.replace("LAST", "custom-call"), flows)
    assert not decoded_in_hlo(PROGRAM.replace("LAST", "add"), [Flow(), flows[1]])
    with pytest.raises(RuntimeError, match="%floats"):
        decoded_in_hlo(PROGRAM.replace("convert(%wide)", "convert"), flows)


def test_static_arguments_and_numpy_arrays(w):
    x = np.ones((ROWS, COLUMNS), np.float32)
    passes_with = lambda **kw: eqquant.debug.assert_not_materialised(
        lambda x, w, activation: activation(x) @ w.T, x, w, **kw
    )
    passes_with(activation=jnp.sin)
