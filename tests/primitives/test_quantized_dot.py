"""`quantized_dot`, and products of arrays."""

import eqquant
import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import debug, Int8, NF4
from helpers import (
    assert_close,
    DEFAULT_FORMATS,
    equations_of,
    exported,
    FORMATS,
    KINDS,
    pairs,
    relative,
    strict,
    TOLERANCE,
)
from jax import lax


FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]


def make(normal, format, *shape, **kwargs):
    q = eqquant.quantize(normal(*shape), format, **kwargs)
    return q, q.dequantize()


#
# Values
#


@pairs("format, precision, m", FORMATS, TOLERANCE, [1, 5, 300])
def test_both_directions_at_every_precision(format, precision, m, normal):
    q, w = make(normal, format, 77, 100, precision=precision)
    exact = np.asarray(w, np.float64)
    x, y = normal(m, 100), normal(m, 77)
    tolerance = TOLERANCE[precision]
    assert relative(x @ q.T, np.asarray(x, np.float64) @ exact.T) < tolerance
    assert relative(y @ q, np.asarray(y, np.float64) @ exact) < tolerance


def rounded_rows(x):
    """Round each row to 127ths of its absmax, in float64."""
    x = np.asarray(x)
    unit = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127)
    return np.round(x * (np.float32(1) / unit)).astype(np.float64) * unit


@pairs(
    "format, precision",
    [*DEFAULT_FORMATS, NF4(double_quantization=True)],
    ["high", "highest", "default"],
)
def test_activations_in_int8(format, precision, normal):
    """W8A8 rounds rows of the activation, and gradients ignore the rounding."""
    compute = eqquant.kernels.Compute(precision, "int8")
    q, w = make(normal, format, 77, 192, compute=compute)
    exact = np.asarray(w, np.float64)
    x, y = normal(2, 5, 192), normal(5, 77)
    integers = format.integer_levels and format.block_size is None
    tolerance = 1e-6 if integers else TOLERANCE[precision]
    assert relative(x @ q.T, rounded_rows(x) @ exact.T) < tolerance
    explained = debug.explain(lambda y, q: y @ q, y, q, platform="cpu")
    if integers and "'int8, AMX'" in explained and jax.default_backend() == "cpu":
        # Tiles multiply the activation by the scales of the weight, and round once.
        scales = np.asarray(q.scales)[:, 0]
        expected = rounded_rows(y * scales) @ (exact / scales[:, None])
        assert relative(y @ q, expected) < 1e-6
    else:
        assert relative(y @ q, rounded_rows(y) @ exact) < TOLERANCE[precision]

    ct = normal(2, 5, 77)
    _, back = jax.vjp(lambda x, q: x @ q.T, x, q)
    x_bar, q_bar = back(ct)
    assert relative(x_bar, np.asarray(ct) @ exact) < TOLERANCE[precision]
    if format.quantized_scales:
        return  # 8-bit scales have no gradient.
    levels = exact / np.where(np.asarray(q.scales) == 0, 1, q.scales).repeat(
        192 // q.scales.shape[-1], -1
    )
    dense_bar = np.einsum("bmn,bmk->nk", np.asarray(ct), rounded_rows(x)) * levels
    expected = dense_bar.reshape(77, q.scales.shape[-1], -1).sum(-1)
    rounding = 2**-8 if q.scales.dtype == jnp.bfloat16 else 1e-6
    assert relative(q_bar.scales, expected) < rounding


def test_activations_in_int8_are_said_and_checked(normal):
    q, _ = make(normal, Int8(), 8, 64, activations="int8")
    assert "activations='int8'" in repr(q.compute)
    explained = eqquant.debug.explain(lambda x: x @ q.T, normal(2, 64))
    assert "activations='int8'" in explained
    with pytest.raises(Exception, match="activations"):
        eqquant.quantize(normal(8, 64), "int8", activations="int4")
    silent = jnp.zeros((2, 64)).at[1, 3].set(1e-37)
    assert not np.isnan(silent @ q.T).any()
    assert np.isnan((silent.at[0, 0].set(jnp.nan) @ q.T)[0]).all()


@hypothesis.settings(max_examples=8)
@hypothesis.given(data=st.data())
def test_matmul_of_any_shapes(data):
    dims = st.sampled_from([1, 2, 5])
    k = data.draw(dims)
    batch = data.draw(st.lists(dims, max_size=2))
    q_batch = batch[data.draw(st.integers(0, len(batch))) :]
    x_batch = [n if data.draw(st.booleans()) else 1 for n in batch]
    reflected = data.draw(st.booleans())
    q_shape = (*q_batch, *((k, data.draw(dims)) if reflected else (data.draw(dims), k)))
    x_shape = (*x_batch, *((data.draw(dims), k) if reflected else (k, data.draw(dims))))
    if data.draw(st.booleans()):
        x_shape = (k,)
    rng = np.random.default_rng(0)
    axis = data.draw(st.integers(-len(q_shape), -1))
    q = eqquant.quantize(
        rng.standard_normal(q_shape).astype(np.float32),
        Int8(),
        axis=axis,
        precision="highest",
    )
    x = jnp.asarray(rng.standard_normal(x_shape), jnp.float32)
    w = q.dequantize()
    got, expected = (x @ q, x @ w) if reflected else (q @ x, w @ x)
    assert_close(got, expected, 1e-5)
    assert_close(np.asarray(x) @ q if reflected else q @ np.asarray(x), expected, 1e-5)


def test_mismatched_shapes(normal):
    q, _ = make(normal, "nf4", 8, 64)
    with pytest.raises(ValueError, match=r"differ in size: \(3, 8\) @ \(64, 8\)"):
        normal(3, 8) @ q.T
    with pytest.raises(ValueError, match="at least one axis"):
        q @ jnp.float32(1)
    with pytest.raises(TypeError):
        q @ "x"


def test_the_product_of_two_quantized_arrays(normal):
    a, dense_a = make(normal, NF4(), 8, 64, precision="highest")
    b, dense_b = make(normal, Int8(), 64, 16, precision="highest")
    with pytest.warns(eqquant.arrays.MaterialiseWarning, match="two quantized"):
        assert relative(a @ b, dense_a @ dense_b) < 1e-5


@pairs("x_dtype, w_dtype", [*FLOATS, jnp.int32], FLOATS)
def test_result_dtypes_are_those_of_jax(x_dtype, w_dtype, normal):
    q = eqquant.quantize(normal(9, 64, dtype=w_dtype), precision="highest")
    x = (3 * normal(5, 64)).astype(x_dtype)
    w = q.dequantize()
    expected = x @ w.T
    # The precision of the narrowest dtype.
    narrow = min(
        (x_dtype, w_dtype), key=lambda d: 32 if d == jnp.int32 else jnp.finfo(d).nmant
    )
    bound = 4 * float(jnp.finfo(expected.dtype).eps) + 4 * (
        0 if narrow == jnp.int32 else float(jnp.finfo(narrow).eps)
    )
    assert_close(x @ q.T, expected, bound)
    assert_close(q @ x.T, w @ x.T, bound)
    dot = lambda x, w: lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if x_dtype != jnp.int32:
        assert eqquant.quaxify(dot)(x, q).dtype == jnp.float32
        plain = lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ())))
        assert eqquant.quaxify(plain)(x, q).dtype == plain(x, w).dtype


def test_float64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        for format in (Int8(), NF4(scale_dtype="float64")):
            q = eqquant.quantize(jnp.asarray(rng.standard_normal((9, 64))), format)
            x = jnp.asarray(rng.standard_normal((5, 64)))
            assert (x @ q.T).dtype == jnp.float64
            # 64 roundings of float64.
            assert relative(x @ q.T, x @ q.dequantize().T) < 64 * 2.0**-53


def test_precision_of_a_call_is_honoured(normal):
    q, w = make(normal, Int8(), 50, 128)  # The default is "high".
    # For fewer rows, some CPUs use an exact kernel at every precision.
    x = normal(600, 128)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    # CPUs without int8 instructions use an exact kernel for "high".
    is_exact = "'float, " in str(debug.explain(lambda x, q: x @ q.T, x, q))
    assert is_exact or relative(x @ q.T, expected) > 1e-6
    assert relative(x @ q.T, expected) < TOLERANCE["high"]
    with jax.default_matmul_precision("float32"):
        assert relative(x @ q.T, expected) < TOLERANCE["highest"]
    for precision in (lax.Precision.HIGHEST, "highest", lax.Precision.DEFAULT):
        dot = eqquant.quaxify(lambda x, w, p=precision: jnp.dot(x, w.T, precision=p))
        error = relative(dot(x, q), expected)
        if precision is lax.Precision.DEFAULT:
            assert 1e-3 < error < TOLERANCE["default"]
        else:
            assert error < TOLERANCE["highest"]


@pairs("format, precision, bad", FORMATS, TOLERANCE, [jnp.nan, jnp.inf])
def test_what_is_not_finite_stays_so_and_stays_there(format, precision, bad, normal):
    q, _ = make(normal, format, 20, 130, precision=precision)
    for column in (0, 129):
        x = normal(4, 130).at[1, column].set(bad)
        y = x @ q.T
        assert not jnp.isfinite(y[1]).any() or bad == jnp.inf
        assert not jnp.isfinite(y[1]).all()
        assert jnp.isfinite(y[jnp.array([0, 2, 3])]).all()


def test_activations_of_zero(format, normal):
    q, _ = make(normal, format, 20, 100)
    assert (jnp.zeros((3, 100)) @ q.T == 0).all()
    assert (jnp.zeros((0, 100)) @ q.T).shape == (0, 20)


def test_bad_operands_of_the_primitive(normal):
    q, _ = make(normal, "nf4", 8, 64)
    with pytest.raises(TypeError, match=r"x .*64.*\(3, 32\)"):
        eqquant.primitives.quantized_dot(
            normal(3, 32), q.codes, q.scales, format=q.format
        )


#
# Transformations
#


# Three weights, one vector, and several vectors.
TRANSFORMATIONS = {
    "jit": lambda w, one, many: jax.jit(lambda w: w[0] @ one)(w),
    "vmap x": lambda w, one, many: jax.vmap(lambda x: w[0] @ x)(many),
    "vmap x, in and out axes": lambda w, one, many: jax.vmap(
        lambda x: w[0] @ x, in_axes=1, out_axes=1
    )(many.T),
    "jvp": lambda w, one, many: jax.jvp(lambda x: w[0] @ x, (one,), (2 * one,)),
    "grad": lambda w, one, many: jax.grad(lambda x: jnp.sum(jnp.sin(w[0] @ x)))(one),
    "vmap of grad": lambda w, one, many: jax.vmap(
        jax.grad(lambda x: jnp.sum(jnp.sin(w[0] @ x)))
    )(many),
    "grad of vmap": lambda w, one, many: jax.grad(
        lambda x: jnp.sum(jnp.sin(jax.vmap(lambda x: w[0] @ x)(x)))
    )(many),
    "hessian": lambda w, one, many: jax.hessian(lambda x: jnp.sum(jnp.sin(w[0] @ x)))(
        one
    ),
    "linearize": lambda w, one, many: jax.linearize(lambda x: w[0] @ x, one)[1](one),
    "checkpoint": lambda w, one, many: jax.grad(
        jax.checkpoint(lambda x: jnp.sum(jnp.sin(w[0] @ x)))
    )(one),
    "scan": lambda w, one, many: lax.scan(
        lambda c, x: (c + w[0] @ x, c), jnp.zeros(20), many
    ),
    "cond": lambda w, one, many: lax.cond(True, lambda: w[0] @ one, lambda: w[1] @ one),
}


@pairs("name, default_format", TRANSFORMATIONS, KINDS)
def test_transformations_agree_with_the_dense_product(name, default_format, normal):
    q, w = make(normal, default_format, 3, 20, 33, precision="highest")
    # Compiled as a whole, because eager operations would compile twenty programs.
    fn, x = jax.jit(TRANSFORMATIONS[name]), (normal(33), normal(4, 33))
    assert_close(fn(q, *x), jax.tree.leaves(fn(w, *x)), 1e-5)


@pairs("default_format, reflected, x_axis", KINDS, [0, 1], [None, 0, 1])
def test_vmap_over_weights(default_format, reflected, x_axis, normal):
    q, w = make(normal, default_format, 3, 20, 33, precision="highest")
    size = 20 if reflected else 33
    x = normal(size) if x_axis is None else jnp.moveaxis(normal(3, size), 0, x_axis)
    product = lambda w, x: x @ w if reflected else w @ x
    run = jax.jit(jax.vmap(product, in_axes=(0, x_axis)))
    assert_close(run(q, x), run(w, x), 1e-5)
    pulled = lambda w, x: jax.grad(lambda x: jnp.sum(jnp.sin(run(w, x))))(x)
    assert_close(pulled(q, x), pulled(w, x), 1e-5)


def test_vmap_over_activations_adds_rows_to_one_product(normal):
    q = eqquant.quantize(normal(24, 64), "nf4")
    product = jax.vmap(lambda x: x @ q.T)
    jaxpr = jax.make_jaxpr(product)(normal(5, 3, 64))
    (eqn,) = equations_of(jaxpr, "quantized_dot")
    assert [var.aval.shape[-2:] for var in eqn.invars[:2]] == [(15, 64), (24, 32)]
    assert eqn.invars[1].aval.ndim == 2


def test_vmap_over_scales(normal):
    q = eqquant.quantize(normal(24, 64), "nf4")
    x, factors = normal(3, 64), jnp.arange(1.0, 6.0)
    with_scales = lambda scales: eqquant.arrays.from_components(
        q.codes, scales, q.format
    )
    got = jax.vmap(lambda factor: x @ with_scales(q.scales * factor).T)(factors)
    expected = jnp.stack([x @ q.T * factor for factor in factors])
    assert_close(got, expected)


def test_the_gradient_with_respect_to_scales(format, normal):
    if format.quantized_scales:
        pytest.skip("scales in 8 bits have no gradient")
    q, _ = make(normal, format, 30, 100, precision="highest")
    x, y = normal(4, 100), normal(4, 30)

    def loss(scales, product):
        w = q.replace(scales=scales)
        return jnp.sum(jnp.sin(product(x, w.T))) + jnp.sum(product(y, w) ** 2)

    matmul = lambda x, w: x @ w
    full = lambda x, w: x @ w.dequantize()
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert relative(gradient(q.scales, matmul), gradient(q.scales, full)) < 1e-5
    eqquant.debug.assert_not_materialised(
        lambda q, x: jax.grad(lambda s: jnp.sum(x @ q.replace(scales=s).T))(q.scales),
        q,
        x,
    )


def test_eval_shape_and_disable_jit(normal):
    q, w = make(normal, "nf4", 20, 100)
    x = normal(4, 100)
    shape = jax.eval_shape(lambda q, x: x @ q.T, q, x)
    assert (shape.shape, shape.dtype) == ((4, 20), jnp.float32)
    with jax.disable_jit():
        assert relative(x @ q.T, x @ w.T) < TOLERANCE["high"]


def test_export(default_format, normal):
    q, _ = make(normal, default_format, 20, 100)
    x = normal(4, 100)
    # Exported programs use XLA's lowering on every platform.
    (out,) = exported(lambda x, q: x @ q.T, x, q)
    assert relative(out, x @ q.T) < TOLERANCE["high"]


@pairs(
    "format, precision, axis, activations",
    KINDS,
    TOLERANCE,
    [-1, 0],
    [None, "int8"],
)
def test_export_for_any_number_of_rows(format, precision, axis, activations, normal):
    """Kernels are not chosen by a comparison of symbols."""
    how = {"axis": axis, "precision": precision, "activations": activations}
    q, w = make(normal, format, 24, 100, **how)
    product = jax.jit(lambda x: x @ q.T)
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 100), "float32")
    program = jax.export.export(product, platforms=["cpu", "tpu", "cuda"])(rows)
    bound = 0.02 if activations else TOLERANCE[precision]
    for m in (1, 300):
        x = normal(m, 100)
        assert relative(program.call(x), x @ w.T) < bound


def test_no_weight_is_materialised(format, normal):
    q, _ = make(normal, format, 211, 127)
    x = normal(5, 127)
    for fn in (
        lambda x, q: x @ q.T,
        lambda x, q: jax.grad(lambda x: jnp.sum(jnp.sin(x @ q.T)))(x),
        lambda x, q: jax.vmap(lambda x: q @ x)(x),
    ):
        eqquant.debug.assert_not_materialised(fn, x, q)


def test_temporaries_are_a_fraction_of_the_weight(default_format, normal):
    q, _ = make(normal, default_format, 4096, 2048)
    x = normal(8, 2048)
    gradient = jax.grad(lambda x, q: jnp.sum((x @ q.T) ** 2))
    for fn in (lambda x, q: x @ q.T, gradient):
        memory = jax.jit(fn).lower(x, q).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * q.size / 2


def test_vmap_over_activations_of_a_stack(normal):
    q, x = eqquant.quantize(normal(3, 24, 64), "nf4"), normal(5, 3, 2, 64)
    product = lambda q, x: jnp.einsum("snk,smk->smn", q, x)
    got = jax.vmap(lambda x: strict(product)(q, x))(x)
    assert_close(got, jnp.einsum("snk,vsmk->vsmn", q.dequantize(), x))
