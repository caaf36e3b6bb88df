"""`quaxify`: operations without a rule, and custom rules."""

import re
import warnings

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant.dispatch.rules import _registry
from helpers import (
    assert_close,
    assert_identical,
    dense,
    relative,
    strict,
)
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from test_dispatch import check_exact


@pytest.fixture
def unregister():
    """Remove the rules that a test registers."""
    before = {name: list(rules) for name, rules in _registry._rules.items()}
    yield
    _registry._rules.clear()
    _registry._rules.update(before)


ELEMENTWISE = {
    "add": lambda q: q + 1,
    "sub": lambda q: 1 - q,
    "mul": lambda q: q * q,
    "div": lambda q: q / jnp.arange(1.0, 65.0),
    "mul by a row": lambda q: q * jnp.arange(64.0),
    "max": lambda q: jnp.maximum(q, 0),
    "min": lambda q: jnp.minimum(0, q),
    "exp": jnp.exp,
    "log": lambda q: jnp.log(jnp.abs(q) + 1),
    "sqrt": lambda q: jnp.sqrt(jnp.abs(q)),
    "integer_pow": lambda q: q**2,
    "pow": lambda q: jnp.abs(q) ** 1.5,
    "lt": lambda q: q < 0,
    "gt": lambda q: q < 0,
    "where": lambda q: jnp.where(q > 0, q, 0),
    "sum": jnp.sum,
    "sort": jnp.sort,
    "cumsum": jnp.cumsum,
    "to integers": lambda q: q.astype(jnp.int32),
    "pad": lambda q: jnp.pad(q, 1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_everything_else_dequantizes_under_the_policy(name, normal):
    fn, q = ELEMENTWISE[name], eqquant.quantize(normal(8, 64), "nf4")
    got = eqquant.quaxify(fn, on_materialise="allow")(q)
    assert_close(got, fn(q.dequantize()), 1e-6)
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        eqquant.quaxify(fn)(q)
    with pytest.raises(eqquant.MaterialiseError, match="register a rule"):
        strict(fn)(q)


@pytest.mark.parametrize(
    "fn", [jnp.exp, jnp.linalg.norm, jax.jit(jnp.cumprod), eqx.nn.LayerNorm((8, 64))]
)
def test_a_warning_names_a_place_in_the_code_of_the_user(fn, normal):
    q = eqquant.quantize(normal(8, 64), "nf4")
    with pytest.warns(eqquant.arrays.MaterialiseWarning) as caught:
        eqquant.quaxify(fn)(q)
    place = re.escape(__file__) + r":\d+"
    assert all(re.search(rf"\(at {place}", str(w.message)) for w in caught)


def test_what_is_decoded_in_full_rounds_activations_as_well(normal):
    # The blocked axis is a batch axis, or groups split it, so no product applies.
    q = eqquant.quantize(normal(4, 8, 16), "int8", axis=0, activations="int8")
    x = normal(4, 16, 5)
    expected = q.dequantize() @ eqquant.training.round_activations(x, axis=1)
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        assert_identical(q @ x, expected)
    einsum = lambda q, x: jnp.einsum("bij,bjk->bik", q, x)
    loose = eqquant.quaxify(einsum, on_materialise="allow")
    assert_close(loose(q, x), expected, 1e-6)  # The order of sums differs.
    with pytest.raises(eqquant.MaterialiseError, match="dot_general"):
        eqquant.quaxify(einsum, on_materialise="error")(q, x)

    conv = eqx.nn.Conv1d(4, 4, 3, groups=2, key=jax.random.key(0))
    quantize = lambda conv, activations: eqx.tree_at(
        lambda conv: conv.weight,
        conv,
        eqquant.quantize(conv.weight, "int8", axis=0, activations=activations),
    )
    x = normal(4, 9)
    run = lambda conv: eqquant.quaxify(conv, on_materialise="allow")(x)
    rounded, plain = (run(quantize(conv, kind)) for kind in ("int8", "float"))
    assert 1e-4 < relative(rounded, plain) < 2e-2  # 8-bit rounding.


def test_what_nobody_reads_is_neither_decoded_nor_an_error(normal):
    q = eqquant.quantize(normal(24, 64), "nf4")

    def fn(w, x):
        jnp.sin(w)  # Haliax inspects a stack for its shapes.
        jax.jit(lambda w: jnp.cumsum(w, 0))(w)
        return x @ w.T

    x = normal(3, 64)
    assert_close(strict(fn)(q, x), fn(dense(q), x))


def test_mixed_formats_in_one_operation(normal):
    arrays = [eqquant.quantize(normal(8, 64), f) for f in ("nf4", "int8", "binary")]
    fn = lambda a, b, c: (a + b) * c @ jnp.concatenate([a, b, c]).T
    got = eqquant.quaxify(fn, on_materialise="allow")(*arrays)
    assert_close(got, fn(*dense(arrays)))


def test_an_unknown_primitive(normal):
    double_p = Primitive("double_of_a_test")
    double_p.def_impl(lambda x: 2 * x)
    double_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(
        double_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
    )
    q = eqquant.quantize(normal(8, 64), "nf4")
    with pytest.warns(eqquant.arrays.MaterialiseWarning, match="double_of_a_test"):
        got = eqquant.quaxify(double_p.bind)(q)
    assert_identical(got, 2 * q.dequantize())


def test_one_warning_for_each_primitive_and_place(normal):
    q = eqquant.quantize(normal(8, 64), "nf4")

    def fn(q):
        return jnp.exp(q), jnp.log(q)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            eqquant.quaxify(fn)(q)
    assert sorted(str(w.message).split("`")[1] for w in caught) == ["exp", "log"]
    assert all(w.filename == __file__ for w in caught)


def test_bad_policy():
    with pytest.raises(Exception, match="on_materialise"):
        eqquant.quaxify(jnp.exp, on_materialise="never")


#
# register
#


def test_a_rule_of_the_user_goes_first(normal, unregister):
    q = eqquant.quantize(normal(8, 64), "nf4")

    @eqquant.register(lax.neg_p)
    def negate(q):
        return q * -4

    assert_identical(strict(jnp.negative)(q).dequantize(), -4 * q.dequantize())

    @eqquant.register(lax.neg_p, lax.exp_p)
    def neither(q, **params):
        return NotImplemented

    assert_identical(strict(jnp.negative)(q).dequantize(), -4 * q.dequantize())
    with pytest.raises(eqquant.MaterialiseError):
        strict(jnp.exp)(q)
    with pytest.raises(TypeError, match="primitives"):
        eqquant.register(jnp.exp)


@pytest.mark.parametrize(
    "rule, message",
    [
        (
            lambda x, y: x,
            r"rule .*<lambda>\(x, y\) at .*test_policy.py:\d+ must take "
            ".* operands of its primitive, which are 1 here",
        ),
        (lambda x: x[:1], r"`exp` has returned .*\(1, 64\).* must return .*\(8, 64\)"),
        (lambda x: 1.0, "`exp` has returned .*float.* must return .*NotImplemented"),
        (lambda x: x.astype("bfloat16"), "has returned .*bfloat16.* must .*float32"),
    ],
)
def test_rules_that_break_the_contract(rule, message, normal, unregister):
    eqquant.register(lax.exp_p)(rule)
    with pytest.raises(TypeError, match=message):
        eqquant.quaxify(jnp.exp)(eqquant.quantize(normal(8, 64), "nf4"))


def test_rules_are_gone_again(normal):
    assert check_exact(jnp.negative, eqquant.quantize(normal(8, 64), "nf4"))
