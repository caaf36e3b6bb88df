"""The Pallas kernels: their numbers in interpret mode, and the real compiler's view."""

import functools as ft

import eqquant
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int8, NF4, Ternary, TPUKernel
from eqquant.debug import compile_for_tpu
from eqquant.kernels import cpu, tpu, xla
from eqquant.kernels._int8 import round_int8
from eqquant.kernels.tpu import _chips
from helpers import kernels_in, needs_compiler, relative
from jax.sharding import PartitionSpec as P


CHIPS = ["v5e", "v6e"]
CHIPS += [pytest.param(c, marks=pytest.mark.slow) for c in ("v4", "v5p", "TPU7x")]
FORMATS = [NF4(), Int8(), Ternary(), Binary()]
# What each variant promises, with room for small shapes.
TOLERANCE = {
    "decode": 1e-4,
    "decode, rounded table": 1e-2,
    "decode, rounded": 2.5e-2,
    "float32": 2e-6,
    "bfloat16": 6e-3,
    "bfloat16, rounded table": 1e-2,
    "int8": 1e-6,
}


def multiply(x, q, *, contract_rows, precision, dtype, chip=None):
    """By a kernel in interpret mode, padding as `quantized_dot`'s callers do."""
    columns = q.shape[1]
    stored = q.codes.shape[1] * 8 // q.format.bits
    if not contract_rows:
        x = jnp.pad(x, ((0, 0), (0, stored - columns)))
    out = tpu.dot(
        x,
        q.codes,
        q.scales,
        format=q.format,
        contract_rows=contract_rows,
        precision=precision,
        weight_dtype=jnp.dtype(dtype),
        out_dtype=jnp.float32,
        interpret=True,
    )
    return out[:, :columns] if contract_rows else out


def check(format, m, rows, columns, *, contract_rows, precision, dtype, seed=0):
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.standard_normal((rows, columns)), jnp.float32)
    q = eqquant.quantize(weight, format)
    size = rows if contract_rows else columns
    x = jnp.asarray(rng.standard_normal((m, size)), dtype)
    out = multiply(x, q, contract_rows=contract_rows, precision=precision, dtype=dtype)
    exact = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (exact if contract_rows else exact.T)
    variant = tpu.choose_variant(
        q.format,
        precision,
        m=m,
        columns=q.codes.shape[1] * 8 // q.format.bits,
        contract_rows=contract_rows,
        dtypes=(jnp.dtype(x.dtype), jnp.dtype(dtype)),
    )
    tolerance = TOLERANCE[variant]
    if variant == "decode" and dtype == "bfloat16":
        tolerance = 2.5e-4  # NF4 in two floats of 8 bits.
    assert relative(out, expected) < tolerance


@pytest.mark.parametrize("contract_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize(
    "precision", ["high", "default", pytest.param("highest", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("m", [8, 40])
def test_kernels(format, m, dtype, precision, contract_rows):
    if format.quantized_scales:
        pytest.skip("kernels get scales in floating point")
    options = dict(contract_rows=contract_rows, precision=precision, dtype=dtype)
    check(format, m, 70, 200, **options)


@pytest.mark.slow
@hypothesis.settings(max_examples=25)
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
    hypothesis.assume(columns > 16)  # Of fewer products the error may be larger.
    check(format, m, rows, columns, **options)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("format", [NF4(), NF4(block_size=None)], ids=repr)
def test_both_ways_to_look_up(axis, format, monkeypatch):
    kind = "TPU v6e" if axis == 0 else "TPU v5e"
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    assert _chips.chip().gather_axis == axis
    for precision in ("high", "default"):
        options = dict(contract_rows=False, precision=precision, dtype="float32")
        check(format, 8, 130, 1000, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_many_blocks_as_a_register_has_lanes(dtype):
    options = dict(contract_rows=False, precision="high", dtype=dtype)
    check(NF4(), 3, 130, 64 * 128, **options)


@pytest.mark.parametrize(
    "kind",
    [
        "TPU v5e",
        "TPU7x",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("TPU v4", "TPU v6e")),
    ],
)
@pytest.mark.parametrize(
    "format",
    [*FORMATS, Ternary(block_size=128), Binary(block_size=256), Int8(block_size=64)],
    ids=repr,
)
@pytest.mark.parametrize("m,dtype", [(8, "float32"), (40, "bfloat16")])
def test_what_each_chip_does(kind, format, m, dtype, monkeypatch):
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    check(format, m, 130, 1000, contract_rows=False, precision="high", dtype=dtype)


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v5e"])
def test_cores_share_an_odd_number_of_steps(kind, monkeypatch):
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    tiles = TPUKernel(tile_n=128)
    for format, rows in ((NF4(tpu=tiles), 300), (Binary(tpu=tiles), 700)):
        check(format, 8, rows, 200, **COLUMNS)


@pytest.mark.parametrize("contract_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("m", [8, 40])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
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


@pytest.fixture
def interpreted(monkeypatch):
    """Every product by the kernels for TPUs, interpreted; a list of which ones."""
    variants = []

    def dot(*args, **params):
        variants.append(tpu.variant_of(*args[:2], **params))
        return tpu.dot(*args, **params, interpret=True)

    jax.clear_caches()
    monkeypatch.setattr(cpu, "why_not", lambda *args, **params: "this is a test")
    monkeypatch.setattr(xla, "dot", dot)
    yield variants
    jax.clear_caches()


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_gradients_through_the_kernels(format, interpreted, normal):
    q = eqquant.quantize(normal(70, 192), format)
    w, x = q.dequantize(), normal(5, 192)

    def loss(x, w):
        return jnp.sum((x @ w.T) ** 2)

    expected = jax.grad(loss)(x, w)
    for gradient in (jax.grad(loss), jax.vmap(jax.grad(loss), (0, None))):
        assert relative(gradient(x, q), expected) < 2 * TOLERANCE["decode"]
    # Mapped, these are the same two products.
    assert set(interpreted) == {"decode", "float32"}


def test_what_a_user_chooses(normal):
    def variant(m, dtype="float32", **choice):
        format = NF4(tpu=TPUKernel(**choice))
        q = eqquant.quantize(normal(256, 256).astype(dtype), format)
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
    check(NF4(tpu=TPUKernel(exact_table=True)), 8, 70, 200, **COLUMNS)
    assert "'float32'" in variant(8, kernel="general")
    assert "'float32'" in variant(8, lookup=False)
    assert "'float32'" in variant(40, kernel="decode")  # There is none for so many.
    check(NF4(tpu=TPUKernel(lookup=False)), 8, 70, 200, **COLUMNS)
    tiles = TPUKernel(kernel="general", tile_m=16, tile_n=128, tile_k=512)
    check(NF4(tpu=tiles), 40, 300, 1300, **COLUMNS)
    check(Ternary(tpu=TPUKernel(tile_n=128)), 8, 300, 1300, **COLUMNS)
    a, b = (eqquant.quantize(normal(8, 64), NF4(tpu=t)) for t in (None, tiles))
    assert jax.tree.structure(a) != jax.tree.structure(b)
    with pytest.raises(ValueError, match="tile_n must be a positive integer"):
        TPUKernel(tile_n=0)
    with pytest.raises(Exception, match="kernel"):
        TPUKernel(kernel="fast")


COLUMNS = dict(contract_rows=False, precision="high", dtype="bfloat16")


def test_stacked_weights(normal):
    q = eqquant.quantize(normal(3, 70, 128), "nf4")
    x = normal(3, 5, 128)
    out = tpu.dot(
        x,
        q.codes,
        q.scales,
        format=q.format,
        contract_rows=False,
        precision="high",
        weight_dtype=jnp.float32,
        out_dtype=jnp.float32,
        interpret=True,
    )
    expected = jnp.einsum("bmk,bnk->bmn", x, q.dequantize(), precision="highest")
    assert relative(out, expected) < TOLERANCE["decode"]


def test_an_unknown_chip_takes_the_nearest_table_and_says_so(monkeypatch):
    monkeypatch.setattr(_chips, "device_kind", lambda: "TPU v99")
    with pytest.warns(UserWarning, match="TPU v99"):
        assert _chips.chip() == _chips._fifth_e


@pytest.mark.parametrize("format", [NF4(block_size=2**20)], ids=repr)
def test_what_has_no_kernel(format, normal):
    q = jax.eval_shape(
        ft.partial(eqquant.quantize, format=format, check_finite=False),
        jax.ShapeDtypeStruct((256, 2**20), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((8, 2**20), jnp.float32)
    options = dict(format=format, weight_dtype=jnp.float32)
    assert "too long" in tpu.why_not(x, q.codes, q.scales, **options)
    x = jax.ShapeDtypeStruct((8, 256), jnp.dtype("float64"))
    assert "float64" in tpu.why_not(x, q.codes, q.scales, **options)


#
# The compiler for TPUs
#


def quantized(rows, columns, format):
    return jax.eval_shape(
        ft.partial(eqquant.quantize, format=format, check_finite=False),
        jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16),
    )


@needs_compiler
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_products_become_kernels(chip, format):
    q = quantized(2048, 2048, format)
    for m, kernel in ((8, "decode"), (256, "columns")):
        x = jax.ShapeDtypeStruct((m, 2048), jnp.bfloat16)
        compiled = compile_for_tpu(lambda x, q: x @ q.T, x, q, chip=chip)
        assert kernels_in(compiled) == [f"{format.name}_{kernel}"]
        # Nothing as large as half of the weight in bfloat16.
        assert compiled.memory_analysis().temp_size_in_bytes < 2**22
    compiled = compile_for_tpu(lambda x, q: x @ q, x, q, chip=chip)
    assert kernels_in(compiled) == [f"{format.name}_rows"]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22


@needs_compiler
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("precision", ["highest", "default"])
def test_ragged_shapes_compile(chip, precision):
    for format in (NF4(precision=precision), Ternary(precision=precision)):
        q = quantized(300, 1300, format)
        for m in (5, 40):
            for size, fn in ((1300, lambda x, q: x @ q.T), (300, lambda x, q: x @ q)):
                x = jax.ShapeDtypeStruct((m, size), jnp.float32)
                assert len(kernels_in(compile_for_tpu(fn, x, q, chip=chip))) == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4", "v5e", "v6e"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_rows_fit_in_memory(chip, dtype):
    for format in (NF4(), Int8()):
        q = quantized(4096, 4096, format)
        x = jax.ShapeDtypeStruct((2048, 4096), jnp.dtype(dtype))
        for fn in (lambda x, q: x @ q.T, lambda x, q: x @ q):
            assert len(kernels_in(compile_for_tpu(fn, x, q, chip=chip))) == 1


@needs_compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e", "TPU7x"])
def test_w8a8_and_choices_compile(chip):
    for format, kernel in (
        (Int8(activations="int8"), "int8_columns"),
        (Ternary(activations="int8"), "ternary_columns"),
        (NF4(tpu=TPUKernel(lookup=False)), "nf4_columns"),
    ):
        q = quantized(1024, 1024, format)
        x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
        compiled = compile_for_tpu(lambda x, q: x @ q.T, x, q, chip=chip)
        assert kernels_in(compiled) == [kernel]


@needs_compiler
@pytest.mark.parametrize("columns", [4096, 8192, 14336])
def test_no_component_is_expanded_outside(columns):
    # The scales are read where they are: no copy, no transpose.
    q = quantized(4096, columns, NF4())
    x = jax.ShapeDtypeStruct((8, columns), jnp.bfloat16)
    compiled = compile_for_tpu(lambda x, q: x @ q.T, x, q)
    held = compiled.memory_analysis().argument_size_in_bytes
    assert (held - 8 * columns * 2) / (4096 * columns) <= 0.57
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@needs_compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_models_and_their_gradients_become_kernels(chip, format):
    model = eqx.filter_eval_shape(
        lambda key: eqquant.quantize_tree(
            eqx.nn.MLP(256, 256, 256, depth=2, key=key), format
        ),
        jax.random.key(0),
    )
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    forward = compile_for_tpu(lambda m, x: jax.vmap(m)(x), model, x, chip=chip)
    assert kernels_in(forward) == [f"{format.name}_decode"] * 3
    backward = compile_for_tpu(
        jax.grad(lambda x, m: jnp.sum(jax.vmap(m)(x) ** 2)), x, model, chip=chip
    )
    assert sorted(kernels_in(backward)) == sorted(
        [f"{format.name}_decode"] * 3 + [f"{format.name}_rows"] * 3
    )


@needs_compiler
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_has_the_kernel_on_every_device(check_vma):
    q = quantized(1024, 512, NF4())
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)

    def fn(x, q):
        return jax.shard_map(
            lambda x, q: x @ q.T,
            in_specs=(P(), P("devices")),
            out_specs=P(None, "devices"),
            check_vma=check_vma,
        )(x, q)

    for f in (fn, jax.grad(lambda x, q: jnp.sum(fn(x, q) ** 2))):
        assert kernels_in(compile_for_tpu(f, x, q, devices=4))


@needs_compiler
def test_automatic_partitioning_compiles_without_a_kernel():
    q = quantized(1024, 512, NF4())
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    assert not kernels_in(compile_for_tpu(lambda x, q: x @ q.T, x, q, devices=4))


def test_compile_for_tpu_names_the_chips():
    with pytest.raises(ValueError, match="v5e"):
        compile_for_tpu(lambda x: x, jnp.ones(3), chip="v3")


def test_explain(normal):
    q = eqquant.quantize(normal(64, 128), "nf4")

    def fn(x, q):
        return jax.vmap(jax.jit(lambda x: q @ x))(x)

    explain = ft.partial(eqquant.debug.explain, fn, normal(5, 128), q)
    assert "Pallas kernel, variant 'decode'" in explain(platform="tpu")
    assert "XLA, recipe 'float'" in explain(platform="gpu")
    assert explain(platform="cpu") == explain()
    backward = eqquant.debug.explain(
        jax.grad(lambda x: jnp.sum(fn(x, q))), normal(5, 128), platform="tpu"
    )
    assert "'float32'" in backward and len(backward.splitlines()) == 2
    long = eqquant.quantize(normal(16, 2**19), NF4(block_size=2**19))
    why = eqquant.debug.explain(jnp.add, 1, 1, platform="tpu")
    assert why == "no product with a quantized weight"
    why = eqquant.debug.explain(
        lambda x: x @ long.T, jnp.ones((2, 2**19)), platform="tpu"
    )
    assert "XLA" in why and "too long" in why
