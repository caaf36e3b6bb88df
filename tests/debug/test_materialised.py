"""`assert_not_materialised` follows where values come from."""

import functools as ft

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.debug._flow import Flow, Weight
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


def caught(fn, *args) -> list[str]:
    found = materialised(fn, *args)
    assert found
    assert len(found) == len(set(found))
    return found


def test_what_decodes_is_caught(w, transform, normal):
    for fn in (
        lambda x, w: x @ w.dequantize().T,
        lambda x, w: jnp.sum(w.dequantize()),
        lambda x, w: w.dequantize().astype("bfloat16"),
        lambda x, w: jnp.where(x[0] > 0, w.dequantize(), 0),
    ):
        with pytest.raises(eqquant.MaterialiseError, match=r"float32\[64,"):
            eqquant.debug.assert_not_materialised(transform(fn), normal(5, COLUMNS), w)


def test_both_the_jaxpr_and_the_program_say_so(w, normal):
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


def test_a_weight_that_the_function_holds(w, normal):
    x = normal(ROWS, COLUMNS)
    passes(lambda x: x @ w.T, x)
    caught(lambda x: x @ w.dequantize().T, x)
    # In a function that it calls, and compiled on its own.
    inner = jax.jit(lambda x: x * w.dequantize())
    caught(lambda x: inner(x), x)


def test_codes_that_come_apart_from_their_array(w, normal):
    again = lambda codes, scales: w.replace(codes=codes, scales=scales)
    x = normal(ROWS, COLUMNS)
    passes(lambda x, c, s, w: x @ again(c, s).T, x, w.codes, w.scales, w)
    caught(lambda x, c, s, w: x @ again(c, s).dequantize(), x, w.codes, w.scales, w)


def test_a_stack_that_is_scanned_over(stack, normal):
    x = normal(ROWS, COLUMNS)
    good = lambda x, stack: lax.scan(lambda x, w: (x @ w.T, None), x, stack)[0]
    bad = lambda x, stack: lax.scan(
        lambda x, w: (x @ w.dequantize().T, None), x, stack
    )[0]
    passes(good, x, stack)
    passes(jax.grad(lambda x, stack: jnp.sum(good(x, stack))), x, stack)
    found = caught(bad, x, stack)  # One matrix at a time.
    assert any("scan/" in line and "[64,64]" in line for line in found)
    # And what puts the matrices that it decodes together again, row by row.
    assert any("[3,64,64]" in line for line in caught(by_rows, stack))


def by_rows(stack):
    rows = lambda w: lax.map(lambda i: w[i], jnp.arange(ROWS))
    return lax.map(rows, stack)


def test_one_matrix_of_a_stack(stack, normal):
    x, i = normal(ROWS, COLUMNS), jnp.array(1)
    passes(lambda x, stack, i: x @ stack[i].T, x, stack, i)
    caught(lambda x, stack, i: x @ stack[i].dequantize().T, x, stack, i)
    chosen = lambda x, stack, i: x @ stack[i[None]].dequantize()[0].T
    caught(chosen, x, stack, i)


def test_vmap(stack, w, normal):
    x = normal(3, ROWS, COLUMNS)
    passes(jax.vmap(lambda x, w: x @ w.T), x, stack)
    passes(jax.vmap(lambda x, w: x @ w.T, in_axes=(0, None)), x, w)
    caught(jax.vmap(lambda x, w: x @ w.dequantize().T), x, stack)


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
    caught(gradient(decoding), x, w)
    passes(tangent, x, w)
    caught(lambda x, w: jax.jvp(lambda x: tangent(x, w), (x,), (x,))[1], x, w)


def test_the_gradient_of_scales(w, normal):
    x = normal(ROWS, COLUMNS)
    loss = lambda s, w, x: jnp.sum(jnp.sin(x @ w.replace(scales=s).T))
    passes(lambda w, x: jax.grad(loss)(w.scales, w, x), w, x)
    dense = lambda s, w, x: jnp.sum(x @ w.replace(scales=s).dequantize())
    caught(lambda w, x: jax.grad(dense)(w.scales, w, x), w, x)


def test_a_rule_that_decodes(w, normal):
    x = normal(5, COLUMNS)
    fn = eqquant.quaxify(lambda x, w: x @ jnp.sin(w).T, on_materialise="allow")
    caught(fn, x, w)
    passes(eqquant.quaxify(lambda x, w: x @ w.T), x, w)


def test_a_while_loop_that_decodes(w, transform, normal):
    x = normal(5, COLUMNS)

    def whole(x, w):
        step = lambda carry: (carry[0] + 1, carry[1] + x @ w.dequantize().T)
        return lax.while_loop(lambda carry: carry[0] < 3, step, (0, x @ w.T))[1]

    found = caught(transform(whole), x, w)
    assert any("while/" in line for line in found)
    if transform is jax.jit:
        return

    def row_by_row(w):
        """No row is large, but all are put into one array."""
        step = lambda i, out: out.at[i].set(w[i])
        return lax.fori_loop(0, ROWS, step, jnp.zeros((ROWS, COLUMNS)))

    caught(row_by_row, w)

    def handed_on(x, w):
        """The codes are decoded a step after they entered the loop's carry."""
        none = jnp.zeros_like(w.codes)

        def step(_, carry):
            codes, out = carry
            return w.codes, out + w.replace(codes=codes).dequantize()

        return lax.fori_loop(0, 3, step, (none, x))[1]

    caught(handed_on, jnp.zeros((ROWS, COLUMNS)), w)


def test_branches_and_remat(w, normal):
    x = normal(ROWS, COLUMNS)
    good, bad = (lambda x, w: x @ w.T), (lambda x, w: x @ w.dequantize().T)
    choose = lambda second: lambda x, w: lax.cond(x[0, 0] > 0, good, second, x, w)
    passes(choose(good), x, w)
    caught(choose(bad), x, w)
    passes(jax.checkpoint(good), x, w)
    caught(jax.checkpoint(bad), x, w)


def test_a_solver(w, normal):
    """Whose primitive alone knows what the inputs of its jaxprs are."""
    b = normal(ROWS)
    solve = lambda fn: jax.scipy.sparse.linalg.cg(fn, b, maxiter=2)[0]
    passes(lambda w: solve(lambda x: x + w @ x), w)
    caught(lambda w: solve(lambda x: x + w.dequantize() @ x), w)


def test_several_devices(normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    q = eqquant.quantize(normal(ROWS, COLUMNS), "int8")
    x = normal(ROWS, COLUMNS)
    over = ft.partial(jax.shard_map, mesh=mesh, in_specs=(spec("x"), spec()))
    passes(over(lambda x, q: x @ q.T, out_specs=spec("x")), x, q)
    caught(over(lambda x, q: x @ q.dequantize().T, out_specs=spec("x")), x, q)


def test_an_embedding(w, normal):
    """As many rows as the table has, but those that are asked for."""
    tokens = jnp.arange(ROWS)
    layer = eqx.nn.Embedding(ROWS, COLUMNS, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, w)
    passes(lambda layer, tokens: jax.vmap(layer)(tokens), layer, tokens)
    passes(lambda layer: jax.vmap(layer)(tokens), layer)
    caught(lambda layer: jax.vmap(layer)(jnp.arange(ROWS)), layer)


def test_positions_are_a_part_of_their_table(w, normal):
    """Added to activations as large as the table."""
    x = normal(8, 8, COLUMNS)
    passes(lambda x, w: jnp.tanh(x + dense(w[:8])), x, w)
    passes(lambda x, w: jnp.tanh(x + dense(w[jnp.arange(8)])), x, w)
    caught(lambda x, w: x + dense(w[jnp.arange(ROWS)]).reshape(x.shape), x, w)


def test_parts_that_are_put_together(w, normal):
    halves = lambda w: [w[: ROWS // 2], w[ROWS // 2 :]]
    whole = lambda join: lambda w: join([jnp.sin(dense(h)) for h in halves(w)])
    passes(whole(lambda parts: [jnp.sum(part) for part in parts]), w)
    caught(whole(jnp.concatenate), w)
    pad = lambda a, before: jnp.pad(a, ((before, ROWS // 2 - before), (0, 0)))
    caught(whole(lambda parts: pad(parts[0], 0) + pad(parts[1], ROWS // 2)), w)


def dense(x):
    return eqquant.dequantize(x) if eqquant.is_quantized(x) else x


def test_two_weights_at_once(w, normal):
    other = eqquant.quantize(normal(32, COLUMNS), "nf4")
    both = eqquant.quaxify(
        lambda w, v: jnp.sin(jnp.concatenate([w, v])), on_materialise="allow"
    )
    caught(both, w, other)


def test_padding_counts(normal):
    q = eqquant.quantize(normal(ROWS, 50), "nf4")
    caught(lambda q: q.replace(padding=0).dequantize(), q)
    passes(lambda x, q: x @ q.T, normal(ROWS, 50), q)


def test_kernels(w, normal):
    """What is inside is not looked at; which one decodes is seen by what it gets."""
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


def test_a_lowering_that_decodes(w, normal, monkeypatch):
    """What a product becomes is looked into as well."""

    def decodes(x, codes, scales, *, matmul):
        return x @ w.replace(codes=codes, scales=scales).dequantize().T

    def slices(x, codes, scales, *, matmul):
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
    weight = Weight(size, size, 2, frozenset({size}))
    flows = [Flow({weight: size}), Flow(data=True)]
    found = decoded_in_hlo(PROGRAM.replace("LAST", "add"), flows)
    assert "compiled: fusion -> f32[64,64]" in found
    # Within the fusion it is decoded, but not in memory.
    assert not decoded_in_hlo(PROGRAM.replace("LAST", "dot"), flows)
    # A kernel that gets an activation multiplies.
    assert not decoded_in_hlo(PROGRAM.replace("LAST", "custom-call"), flows)
    assert not decoded_in_hlo(PROGRAM.replace("LAST", "add"), [Flow(), flows[1]])
    with pytest.raises(RuntimeError, match="cannot read: %floats"):
        decoded_in_hlo(PROGRAM.replace("convert(%wide)", "convert"), flows)


def test_static_arguments_and_arrays_of_numpy(w):
    x = np.ones((ROWS, COLUMNS), np.float32)
    passes_with = lambda **kw: eqquant.debug.assert_not_materialised(
        lambda x, w, how: how(x) @ w.T, x, w, **kw
    )
    passes_with(how=jnp.sin)
