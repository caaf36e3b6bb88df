"""Operators, methods and attributes of `jax.Array`: supported, or a helpful error."""

import copy
import operator as op

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from eqquant.arrays import LoraArray
from eqquant.training import StraightThroughArray
from helpers import assert_close, assert_identical, pairs, strict
from jax import lax


KINDS = {
    "nf4": lambda w: eqquant.quantize(w, "nf4"),
    "double": lambda w: eqquant.quantize(w, NF4(double_quantization=True)),
    "bfloat16 scales": lambda w: eqquant.quantize(w, Int8(scale_dtype="bfloat16")),
    "ternary": lambda w: eqquant.quantize(w, Ternary(block_size=32)),
    "axis 0": lambda w: eqquant.quantize(w.T, Binary(), axis=0).T,
    "lora": lambda w: lora(eqquant.quantize(w, "nf4")),
    "lora of floats": lambda w: lora(w),
    "straight through": lambda w: StraightThroughArray(w, eqquant.quantize(w, "nf4")),
}


def lora(base):
    a, b = jax.random.normal(jax.random.key(0), (2, 64, 4))
    return LoraArray(base, a.T, b[: len(base)], None, 0.5, 0.0, (-1,), (-2,))


SCALED = {
    "number": lambda w, s: w * 3,
    "from the left": lambda w, s: 0.3 * w,
    "quotient": lambda w, s: w / 7,
    "negative": lambda w, s: -w,
    "traced": lambda w, s: w * s[0],
    "row": lambda w, s: w * s[:, None],
    "quotient of rows": lambda w, s: w.T / s,
    "one element": lambda w, s: jnp.full((1, 1), 2.0) * w,
    "numpy": lambda w, s: np.float32(2.5) * w / np.arange(1, 25)[:, None],
    "wider": lambda w, s: w.astype("bfloat16") * s[0],
    "narrow": lambda w, s: w.astype("bfloat16") * 0.3,
}


@pairs("how, kind", SCALED, KINDS)
def test_scaling_keeps_it_in_parts(how, kind, normal):
    w, s, x = KINDS[kind](normal(24, 64)), jnp.abs(normal(24)) + 0.1, normal(5, 64)
    fn, dense = SCALED[how], w.dequantize()
    scaled, expected = fn(w, s), fn(dense, s)
    assert type(scaled) is type(w)
    assert (scaled.shape, scaled.dtype) == (expected.shape, expected.dtype)
    # Values are rounded once, to the dtype of the result.
    eps = float(jnp.finfo("bfloat16" if how == "wider" else expected.dtype).eps)
    assert_close(scaled.dequantize(), expected, 2 * eps)
    by_rules = eqquant.quaxify(fn, on_materialise="error")(w, s)
    assert_identical(by_rules.dequantize(), scaled.dequantize())

    last = lambda w: w if w.shape == (24, 64) else w.T
    loss = lambda s, w: jnp.sum(jnp.sin(x @ last(fn(w, s)).T.astype("float32")))
    short = how in ("wider", "narrow") or kind == "bfloat16 scales"
    gradient = jax.jit(jax.grad(loss))
    with jax.default_matmul_precision("highest"):
        assert_close(gradient(s, w), gradient(s, dense), 2e-2 if short else 1e-4)


def test_scaling_by_a_power_of_two_is_exact(format, normal):
    w = normal(7, 200)
    q = eqquant.quantize(w, format)
    for fn in (lambda w: w * 2, lambda w: -w, lambda w: w / 8):
        assert_identical(fn(q).dequantize(), fn(q.dequantize()))
        # The product is exact.
        assert_identical(fn(q) @ w[0], fn(q @ w[0]))


@pairs(
    "kind, dtype, exponent",
    [Ternary(), Ternary(block_size=32), Binary(), Binary(scale_dtype="bfloat16")],
    ["float32", "bfloat16", "float16"],
    [1, 3, 5],
)
def test_odd_powers_of_signs_are_exact(kind, dtype, exponent, normal):
    w = (0.1 * normal(7, 100)).astype(dtype).at[2].set(0)
    q = eqquant.quantize(w, kind)
    power = lambda w: w**exponent
    expected = power(q.dequantize())
    assert_identical(power(q).dequantize(), expected)
    assert_identical(jax.jit(power)(q).dequantize(), jax.jit(power)(q.dequantize()))
    by_rule = strict(lambda w: lax.integer_pow(w, exponent))(q)
    assert_identical(by_rule.dequantize(), expected)
    if dtype == "float32" and kind.scale_dtype == "float32":
        loss = lambda q, scales: power(q.replace(scales=scales)).dequantize()
        by_hand = lambda q, scales: power(q.replace(scales=scales).dequantize())
        for fn in (loss, by_hand):
            fn.gradient = jax.grad(lambda s, fn=fn: jnp.sum(fn(q, s)))(q.scales)
        assert_close(loss.gradient, by_hand.gradient, 1e-6)


def test_other_powers_are_errors_and_decode_in_quaxify(normal):
    w = normal(8, 64)
    ternary, nf4 = eqquant.quantize(w, "ternary"), eqquant.quantize(w, "nf4")
    assert_identical(nf4**1, nf4)
    some = [(ternary, 2), (ternary, 0), (ternary, -1), (ternary, 1.5), (ternary, w)]
    for q, exponent in (*some, (nf4, 3), (nf4, True), (lora(ternary), 3)):
        with pytest.raises(TypeError, match="`[*][*]` with .*quaxify.*dequantize"):
            q**exponent
    with pytest.raises(TypeError, match="quaxify"):
        pow(ternary, 3, 5)
    with pytest.raises(TypeError, match="quaxify"):
        2**ternary
    for q in (nf4, lora(ternary)):
        with pytest.raises(eqquant.MaterialiseError, match="integer_pow"):
            strict(lambda q: q**3)(q)


def test_powers_decode_if_a_subclass_changes_levels(normal):
    """A subclass with new levels does not inherit `unit_levels`."""

    class Doubled(Ternary):
        def levels(self, codes, dtype):
            return 2 * super().levels(codes, dtype)

    q = eqquant.quantize(normal(4, 64), Ternary())
    q = q.replace(format=Doubled())
    with pytest.raises(TypeError, match="quaxify"):
        q**3


def test_scaling_between_casts(normal):
    w, x = normal(8, 64).astype("bfloat16"), normal(3, 64)
    q = eqquant.quantize(w, "int8")
    fn = lambda w: (2 * w.astype("float32") / 4).astype("bfloat16")
    for scaled in (fn(q), strict(fn)(q), jax.jit(strict(fn))(q)):
        assert isinstance(scaled, eqquant.QuantizedArray)
        assert_identical(scaled.dequantize(), fn(q.dequantize()))
    product = lambda w, x: x @ fn(w).T
    eqquant.debug.assert_not_materialised(strict(product), q, x)


def test_a_model_that_scales_its_weights_decodes_nothing(normal):
    """Haliax multiplies each weight by 1.0."""
    q = eqquant.quantize(normal(48, 64), "int8")
    f = lambda w, x: jnp.einsum("ij,bj->bi", w * 1.0 / jnp.sqrt(64.0), x)
    eqquant.debug.assert_not_materialised(strict(f), q, normal(5, 64))


def test_scaling_with_what_differs_within_a_block_is_an_error(normal):
    w = normal(8, 64)
    q = eqquant.quantize(w, "nf4")
    for other in (w, w[:1], w[0], jnp.ones((3, 8, 64)), q, 1j, jnp.ones((2, 8, 1))):
        for fn in (op.mul, lambda a, b: op.mul(b, a), op.truediv):
            with pytest.raises(TypeError, match="quaxify.*dequantize"):
                fn(q, other)
    for fn in (op.mul, op.truediv):
        with pytest.raises(TypeError):
            fn(q, "a")
    with pytest.raises(TypeError, match=r"with an array of shape \(1, 64\)"):
        q * w[:1]
    with pytest.raises(TypeError, match="with 1j"):
        q * 1j


REFUSED = {
    **{f.__name__: f for f in (op.eq, op.ne, op.lt, op.le, op.gt, op.ge)},
    **{f.__name__: f for f in (op.add, op.sub, op.floordiv, op.mod, divmod)},
    **{f.__name__: f for f in (op.and_, op.or_, op.xor, op.lshift, op.rshift)},
    "reflected /": lambda q, x: x / q,
    "reflected -": lambda q, x: x - q,
    "in": lambda q, x: x in q,
    "bool": lambda q, _: bool(q),
    "not": lambda q, _: not q,
    "int": lambda q, _: int(q),
    "float": lambda q, _: float(q),
    "complex": lambda q, _: complex(q),
    "abs": lambda q, _: abs(q),
    "round": lambda q, _: round(q),
    "~": lambda q, _: ~q,
    "[] =": lambda q, x: op.setitem(q, 0, x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_operators_are_errors(name, normal):
    q = eqquant.quantize(normal(8, 64), "nf4")
    for other in (1, 2.5, normal(8, 64), np.ones(64), q):
        with pytest.raises(
            TypeError, match="not supported by nf4.*quaxify.*dequantize"
        ):
            REFUSED[name](q, other)


def test_all_of_an_array_is_there_or_an_error_that_says_what_to_do(normal):
    w = normal(8, 64)
    q = eqquant.quantize(w, "nf4")
    there = set()
    for name in dir(jax.Array):
        if not name.startswith("_"):
            if hasattr(q, name):
                there.add(name)
            else:
                with pytest.raises(TypeError, match=f"`.{name}` is not.*quaxify"):
                    getattr(q, name)
    assert there == {
        *("T", "astype", "copy", "dtype", "flatten", "mT", "nbytes", "ndim", "ravel"),
        *("reshape", "shape", "size", "squeeze", "swapaxes", "transpose"),
    }
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        _ = q.weights


def test_those_that_are_there(normal):
    w = normal(3, 8, 64)
    q = eqquant.quantize(w, "nf4")
    dense = q.dequantize()
    assert_identical(q.swapaxes(0, -1).dequantize(), dense.swapaxes(0, -1))
    assert_identical((+q).dequantize(), dense)
    for copied in (q.copy(), copy.copy(q), copy.deepcopy(q)):
        assert eqx.tree_equal(copied, q)
    assert q.block_until_ready() is q
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        assert_identical(q.flatten(), dense.ravel())
    row = eqquant.quantize(normal(1, 64), "nf4")
    assert isinstance(row.ravel(), eqquant.QuantizedArray)


def test_equality_of_trees_is_that_of_their_parts(normal):
    q = eqquant.quantize(normal(8, 64), "nf4")
    assert eqx.tree_equal(q, q.copy()) and not eqx.tree_equal(q, q * 2)
    assert eqx.tree_equal([q], [q.astype("bfloat16")]) is False
    assert len({jax.tree.structure(q), jax.tree.structure(q * 2)}) == 1
    static = eqx.filter(q, lambda _: False)
    assert hash(static) == hash(copy.copy(static))
