"""Test the TPU kernels: their values in interpret mode, and the choice of a kernel."""

import functools as ft

import eqquant
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, FP8, Int3, Int4, Int8, NF4, Ternary
from eqquant.formats import Int5, Int6
from eqquant.kernels import choose, Compute, Matmul, tpu, TPUKernel, View
from eqquant.kernels._int8 import round_int8
from eqquant.kernels.tpu import _chips, _weights
from eqquant.primitives import _codes_dot, _lowering
from helpers import (
    assert_identical,
    FORMATS as EVERY_FORMAT,
    multiply_by,
    pairs,
    relative,
    slow,
)


FORMATS = [NF4(), Int8(), Ternary(), Binary()]
# Upper bounds of the errors of each variant, with a margin for small shapes.
TOLERANCE = {
    "decode": 1e-4,
    "decode, rounded table": 1e-2,
    "decode, rounded": 2.5e-2,
    "float32": 2e-6,
    "bfloat16": 6e-3,
    "bfloat16, rounded table": 1e-2,
    "int8": 1e-6,
}


def multiply(x, q, *, contract_rows, precision, dtype, kernel=None):
    """Multiply by a kernel in interpret mode, and pad as callers of `quantized_dot`
    do."""
    columns = q.shape[1]
    stored = q.codes.shape[1] * 8 // q.format.bits
    if not contract_rows:
        x = jnp.pad(x, ((0, 0), (0, stored - columns)))
    matmul = Matmul(q.format, contract_rows, Compute(precision, tpu=kernel), dtype)
    args = x, q.codes, q.scales
    out = multiply_by(tpu.KERNELS, matmul, *args, interpret=True)
    try:
        out.block_until_ready()
    except jax.errors.JaxRuntimeError as e:
        if "DotThunk" not in str(e):
            raise
        pytest.skip("XLA for CPUs of jaxlib 0.12.0 compiles this, but cannot run it")
    return out[:, :columns] if contract_rows else out


def check(
    format, m, rows, columns, *, contract_rows, precision, dtype, kernel=None, seed=0
):
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.standard_normal((rows, columns)), jnp.float32)
    q = eqquant.quantize(weight, format)
    size = rows if contract_rows else columns
    x = jnp.asarray(rng.standard_normal((m, size)), dtype)
    options = dict(precision=precision, dtype=dtype, kernel=kernel)
    out = multiply(x, q, contract_rows=contract_rows, **options)
    exact = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (exact if contract_rows else exact.T)
    compute = Compute(precision, tpu=kernel)
    matmul = Matmul(q.format, contract_rows, compute, dtype)
    size = x.shape[1] if contract_rows else q.codes.shape[1] * 8 // q.format.bits
    padded = jax.ShapeDtypeStruct((m, size), x.dtype)
    variant = choose(tpu.KERNELS, matmul.of(padded, q.codes, q.scales)).name
    tolerance = TOLERANCE[variant]
    if variant == "decode" and dtype == "bfloat16":
        tolerance = 2.5e-4  # NF4 in two float8 digits.
    assert relative(out, expected) < tolerance


@pytest.mark.slow
@pairs(
    "format, m, contract_rows, stacked_scales",
    [NF4(), Int8(), *map(slow, (Ternary(), Int3(), Binary()))],
    [8, 40],
    [False, True],
    [True, False],
)
def test_layers_of_a_stack_are_read_in_place(
    format, m, contract_rows, stacked_scales, normal
):
    """Results equal the results for slices, bit for bit."""
    q = eqquant.quantize(normal(3, 2, 256, 512), format)
    x = normal(2, m, 256 if contract_rows else 512)
    matmul = Matmul(format, contract_rows)
    multiply = ft.partial(multiply_by, tpu.KERNELS, matmul, interpret=True)
    for i in (1, 7):  # An index out of bounds is clamped.
        scales = q.scales if stacked_scales else None
        view = View(jnp.int32(i), q.codes, scales)
        own = view.take((q.codes, q.scales))
        assert_identical(multiply(x, *own, view=view), multiply(x, *own))
    index = jnp.array([2, 0])  # A matrix for each product.
    view = View(index, q.codes[:, 0], q.scales[:, 0] if stacked_scales else None)
    own = view.take((q.codes[:, 0], q.scales[:, 0]))
    assert_identical(multiply(x, *own, view=view), multiply(x, *own))


@pairs(
    "format, precision, dtype, m, contract_rows",
    [f for f in EVERY_FORMAT if not f.quantized_scales],
    ["high", "default", "highest"],
    ["float32", "bfloat16"],
    [8, 40],
    [False, True],
)
def test_kernels(format, precision, dtype, m, contract_rows):
    options = dict(contract_rows=contract_rows, precision=precision, dtype=dtype)
    check(format, m, 70, 200, **options)


@pytest.mark.slow
@hypothesis.settings(max_examples=15)
@hypothesis.given(
    format=st.sampled_from(
        [*FORMATS, NF4(block_size=48), NF4(block_size=512), Int8(block_size=64)]
    ),
    m=st.integers(1, 70),
    rows=st.integers(1, 600),
    columns=st.integers(1, 2500),
    contract_rows=st.booleans(),
    precision=st.sampled_from(["highest", "high", "default"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_kernels_of_any_shape(format, m, rows, columns, **options):
    hypothesis.assume(columns > 16)  # Short sums have larger relative errors.
    check(format, m, rows, columns, **options)


@pairs(
    "axis, format, precision",
    [0, 1],
    [NF4(), NF4(block_size=None)],
    ["high", "default"],
)
def test_both_axes_of_lookups(axis, format, precision, monkeypatch):
    kind = "TPU v6e" if axis == 0 else "TPU v5e"
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    assert _chips.chip().gather_axis == axis
    options = dict(contract_rows=False, precision=precision, dtype="float32")
    check(format, 8, 130, 1000, **options)


@pytest.mark.parametrize("kind, parts", [("TPU v5e", 128), ("TPU v6e", 0)])
def test_a_quarter_of_the_rows_by_logic(kind, parts, monkeypatch):
    rows, by_logic = [], _weights._by_logic

    def counted(circuit, codes):
        rows.append(codes.shape[0])
        return by_logic(circuit, codes)

    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    monkeypatch.setattr(_weights, "_by_logic", counted)
    check(NF4(), 8, 512, 256, **COLUMNS)
    assert set(rows) == ({parts} if parts else set())


@pytest.mark.slow
def test_as_many_blocks_as_a_register_has_lanes():
    options = dict(contract_rows=False, precision="high", dtype="bfloat16")
    check(NF4(), 3, 130, 64 * 128, **options)


@pairs(
    "kind, format, operand",
    ["TPU v5e", "TPU7x", slow("TPU v4"), slow("TPU v6e")],
    [NF4(), Ternary(block_size=128), Binary(), Int8(block_size=64)]
    + [slow(f) for f in (Int8(), Ternary(), Binary(block_size=256))]
    + [Int4(), Int3(), Int5(), Int6(), FP8()],
    [(8, "float32"), (40, "bfloat16")],
)
def test_products_on_each_chip(kind, format, operand, monkeypatch):
    m, dtype = operand
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    check(format, m, 130, 1000, contract_rows=False, precision="high", dtype=dtype)


@pairs(
    "kind, dtype, m, precision",
    ["TPU v5e", "TPU v6e", slow("TPU v5p")],
    ["float32", "bfloat16"],
    [5, 16],
    ["high", "default"],
)
def test_binary_bit_by_bit(kind, dtype, m, precision, monkeypatch, normal):
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    rows, columns = 130, 1500
    q = eqquant.quantize(normal(rows, columns), Binary())
    # The sum of a row is far from zero, like the sums of bits.
    x = (normal(m, columns) + 3).at[1].set(0).astype(dtype)
    out = multiply(x, q, contract_rows=False, precision=precision, dtype=dtype)
    w = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ w.T
    assert not out[1].any()
    if kind == "TPU v6e":
        tolerance = 4e-5
    elif dtype == "bfloat16":
        tolerance = 3e-6  # float32 rounding, relative to the sum.
    else:
        tolerance = 8e-6 if precision == "high" else 3e-3
    assert relative(out, expected) < tolerance


def test_the_operands_of_binary_codes(monkeypatch):
    q = eqquant.quantize(jnp.ones((128, 1024)), Binary())

    def described(kind, m, dtype="bfloat16"):
        monkeypatch.setattr(_chips, "device_kind", lambda: kind)
        x = jax.ShapeDtypeStruct((m, 1024), jnp.dtype(dtype))
        matmul = Matmul(q.format, weight_dtype="bfloat16")
        product = matmul.of(x, q.codes, q.scales)
        return choose(tpu.KERNELS, product).describe(product)

    for kind in ("TPU v5e", "TPU v5p"):
        assert "as bits of float8 (activations not rounded)" in described(kind, 32)
    assert "as bits of int4 (activations rounded to 15 bits)" in described("TPU v6e", 8)
    assert "as float8 (activations not rounded)" in described("TPU v6e", 32)
    assert "as float8 (activations rounded to 8 bits)" in described(
        "TPU v6e", 8, "int8"
    )
    assert "as bfloat16" in described("TPU v4", 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TPU v5", "TPU v5e"])
def test_cores_share_an_odd_number_of_steps(kind, monkeypatch):
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    tiles = TPUKernel(tile_n=128)
    for format, rows in ((NF4(), 300), (Binary(), 700)):
        check(format, 8, rows, 200, kernel=tiles, **COLUMNS)


@pairs("format, m, contract_rows", FORMATS, [8, 40], [False, True])
def test_activations_in_int8(format, m, contract_rows, normal):
    q = eqquant.quantize(normal(130, 192), format)
    x = jnp.round(127 * jnp.tanh(normal(m, 130 if contract_rows else 192)))
    out = multiply(
        x.astype(jnp.int8), q, contract_rows=contract_rows, precision="high", dtype="f4"
    )
    w = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (w if contract_rows else w.T)
    exact = format.integer_levels and not contract_rows
    assert relative(out, expected) < (1e-6 if exact else TOLERANCE["decode"])


@pytest.mark.parametrize("shape", [(40, 256), (3, 300, 128), (2, 5, 100)])
def test_rounding_rows(shape, normal):
    x = normal(*shape).at[..., 3, :].set(0)
    rows, unit = tpu._round.round_rows(x, interpret=True)
    expected_rows, expected_unit = round_int8(x)
    assert (rows == expected_rows).all() and (unit == expected_unit).all()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "shape, dtype", [((256, 384), "float32"), ((2, 384, 128), "bfloat16")]
)
def test_rounding_along_an_axis_times_a_factor(shape, dtype, axis, normal):
    x = normal(*shape).at[..., 3, :].set(0).astype(dtype)
    of_factor = list(shape)
    of_factor[-3 - axis] = 1
    factor = jnp.exp(normal(*of_factor))
    assert tpu.can_round_along(shape, axis)
    for given in (None, factor):
        codes, scales = tpu.round_along(x, given, axis, interpret=True)
        y = x.astype(jnp.float32)
        y = y if given is None else y * given
        expected = round_int8(jnp.moveaxis(y, axis, -1))
        for got, want in zip((codes, scales), expected, strict=True):
            assert_identical(jnp.moveaxis(got, axis, -1), want)


def test_which_arrays_are_rounded_along_an_axis():
    assert tpu.can_round_along((2, 4096, 14336), -1)
    assert tpu.can_round_along((4096, 14336), -2)
    assert not tpu.can_round_along((4096, 130), -1)
    assert not tpu.can_round_along((100, 128), -2)
    # A tile has 128 rows of the transpose, which must fit in vector memory.
    assert not tpu.can_round_along((32768, 128), -2)


@pytest.mark.parametrize("over", [(-1, -1), (-1, -2), (-2, -2)])
def test_products_of_two_arrays_of_int8_codes(over, monkeypatch):
    monkeypatch.setattr(_chips, "device_kind", lambda: "TPU v6e")
    lower = tpu.GeneralKernel.lower
    monkeypatch.setattr(
        tpu.GeneralKernel, "lower", ft.partialmethod(lower, interpret=True)
    )
    rng = np.random.default_rng(0)
    m, n, k = 128, 256, 384
    codes = lambda rows, axis: rng.integers(
        -127, 128, (2, rows, k) if axis == -1 else (2, k, rows), np.int8
    )
    a, b = codes(m, over[0]), codes(n, over[1])
    scales = [np.exp(rng.standard_normal((2, rows, 1), np.float32)) for rows in (m, n)]
    has = True, over[1] == -1
    assert tpu.multiplies_int8(a.shape, b.shape, over)
    static = {"over": over, "has": has, "out_dtype": jnp.dtype("float32")}
    operands = map(jnp.asarray, (a, b, *scales[: 1 + has[1]]))
    out = _codes_dot._on_tpu(*operands, **static)
    exact = np.einsum(
        "smk,snk->smn",
        *(
            np.asarray(x if axis == -1 else np.swapaxes(x, -1, -2), np.float64)
            for x, axis in zip((a, b), over, strict=True)
        ),
    )
    exact = exact * scales[0]
    exact = exact * np.swapaxes(scales[1], -1, -2) if has[1] else exact
    # The sums are exact: only the scales round.
    assert relative(out, exact) < 1e-6


@pytest.mark.parametrize("chip, takes", [("TPU v5e", True), ("TPU7x", False)])
def test_which_products_of_codes_have_a_kernel(chip, takes, monkeypatch):
    monkeypatch.setattr(_chips, "device_kind", lambda: chip)
    assert tpu.multiplies_int8((256, 128), (384, 128), (-1, -1)) == takes
    assert not tpu.multiplies_int8((256, 130), (384, 130), (-1, -1))
    # 127**2 times this length overflows int32.
    assert not tpu.multiplies_int8((128, 2**18), (128, 2**18), (-1, -1))


@pytest.fixture
def interpreted(monkeypatch):
    """Compute every product by TPU kernels in interpret mode; list their names."""
    variants = []

    for cls in (tpu.DecodeKernel, tpu.GeneralKernel):

        def lower(self, *args, lower=cls.lower):
            variants.append(self.name)
            return lower(self, *args, interpret=True)

        monkeypatch.setattr(cls, "lower", lower)

    jax.clear_caches()
    original = _lowering.choose_kernel
    chosen = lambda tiers, *args: original((tpu.KERNELS,), *args)
    monkeypatch.setattr(_lowering, "choose_kernel", chosen)
    yield variants
    jax.clear_caches()


@pytest.mark.parametrize(
    "format", [NF4(), *map(slow, [*FORMATS[1:3], Binary()])], ids=repr
)
def test_gradients_through_the_kernels(format, interpreted, normal):
    q = eqquant.quantize(normal(70, 192), format)
    w, x = q.dequantize(), normal(5, 192)

    def loss(x, w):
        return jnp.sum((x @ w.T) ** 2)

    expected = jax.grad(loss)(x, w)
    for gradient in (jax.grad(loss), jax.vmap(jax.grad(loss), (0, None))):
        assert relative(gradient(x, q), expected) < 2 * TOLERANCE["decode"]
    # vmap yields the same two products.
    assert set(interpreted) == {"decode", "float32"}


@pytest.mark.slow
def test_choices_of_the_user(normal):
    def variant(m, dtype="float32", **choice):
        compute = Compute(tpu=TPUKernel(**choice))
        q = eqquant.quantize(normal(256, 256).astype(dtype), compute=compute)
        return eqquant.debug.explain(
            lambda x, q: x @ q.T, normal(m, 256).astype(dtype), q, platform="tpu"
        )

    assert "'decode'" in variant(8)
    assert "'decode, rounded table'" in variant(8, "bfloat16")
    assert "'decode'" in variant(8, "bfloat16", exact_table=True)
    assert "'decode, rounded table'" in variant(8, exact_table=False)
    assert "'bfloat16, rounded table'" in variant(40, "bfloat16")
    assert "'bfloat16'" in variant(40, "bfloat16", exact_table=True)
    assert "'bfloat16'" in variant(1024, "bfloat16")
    check(NF4(), 8, 70, 200, kernel=TPUKernel(exact_table=True), **COLUMNS)
    assert "'float32'" in variant(8, kernel="general")
    assert "'float32'" in variant(8, lookup=False)
    assert "'float32'" in variant(40, kernel="decode")  # It has at most 32 rows.
    check(NF4(), 8, 70, 200, kernel=TPUKernel(lookup=False), **COLUMNS)
    tiles = TPUKernel(kernel="general", tile_m=16, tile_n=128, tile_k=512)
    check(NF4(), 40, 300, 1300, kernel=tiles, **COLUMNS)
    check(Ternary(), 8, 300, 1300, kernel=TPUKernel(tile_n=128), **COLUMNS)
    for size in (0, True):
        with pytest.raises(ValueError, match=f"tile_n is {size}.*positive integer"):
            TPUKernel(tile_n=size)
    with pytest.raises(Exception, match="kernel"):
        TPUKernel(kernel="fast")


COLUMNS = dict(contract_rows=False, precision="high", dtype="bfloat16")


def test_stacked_weights(normal):
    q = eqquant.quantize(normal(3, 70, 128), "nf4")
    x = normal(3, 5, 128)
    args = x, q.codes, q.scales
    out = multiply_by(tpu.KERNELS, Matmul(q.format), *args, interpret=True)
    expected = jnp.einsum("bmk,bnk->bmn", x, q.dequantize(), precision="highest")
    assert relative(out, expected) < TOLERANCE["decode"]


def test_an_unknown_chip_uses_the_nearest_parameters_and_warns(monkeypatch):
    monkeypatch.setattr(_chips, "device_kind", lambda: "TPU v99")
    with pytest.warns(UserWarning, match="TPU v99"):
        assert _chips.chip() == _chips._fifth_e


@pytest.mark.parametrize("format", [NF4(block_size=2**20)], ids=repr)
def test_products_without_a_kernel(format, normal):
    q = jax.eval_shape(
        ft.partial(eqquant.quantize, format=format, check_finite=False),
        jax.ShapeDtypeStruct((256, 2**20), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((8, 2**20), jnp.float32)
    reason = lambda x: choose(tpu.KERNELS, Matmul(format).of(x, q.codes, q.scales))
    assert "too long" in reason(x)
    x = jax.ShapeDtypeStruct((8, 256), jnp.dtype("float64"))
    assert "float64" in reason(x)
