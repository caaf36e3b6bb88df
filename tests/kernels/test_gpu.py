"""Test products on GPUs in XLA: their values on any platform, and compiled programs."""

import dataclasses
import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int8, NF4, Ternary
from eqquant.arrays.quantized import _encode
from eqquant.debug import compile_for_gpu
from eqquant.debug._flow import Flow
from eqquant.debug._in_hlo import decoded_in_hlo
from eqquant.debug._inspect import weight_of
from eqquant.kernels import gpu, Matmul
from eqquant.kernels.gpu import _portable, _tiles
from eqquant.primitives import _codes_dot
from eqquant.primitives._lowering import dot_by, PORTABLE, tiers_of
from helpers import FORMATS, needs_gpu_compiler, pairs, relative, TOLERANCE


GPU = tiers_of("gpu")


def product(x, q, *, by=GPU, dtype="float32", precision="high", contract_rows):
    compute = q.compute.updated(precision=precision)
    matmul = Matmul(q.format, contract_rows, compute, q.dtype, dtype)
    return jax.jit(ft.partial(dot_by(by), matmul=matmul))(x, q.codes, q.scales)


# Kernels receive float scales without offsets.
CASES = [f for f in FORMATS if not f.quantized_scales and not f.has_offsets]


@pairs("format, precision, m, contract_rows", CASES, TOLERANCE, [1, 6], [False, True])
def test_ragged_products(format, precision, m, contract_rows, normal, monkeypatch):
    monkeypatch.setattr(
        _tiles, "_tile_bytes", 8000
    )  # Several tiles; the last is smaller.
    q = eqquant.quantize(normal(77, 192), format)
    x = normal(m, 77 if contract_rows else 192)
    out = product(x, q, precision=precision, contract_rows=contract_rows)
    w = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (w if contract_rows else w.T)
    bound = {"highest": 1e-6, "high": 2e-5, "default": 1e-2}[precision]
    assert relative(out, expected) < bound


@pairs(
    "format, dtype, contract_rows",
    [NF4(), Int8(), Ternary()],
    ["bfloat16", "float16"],
    [False, True],
)
def test_16_bit_products_match_dense_products(format, dtype, contract_rows, normal):
    q = eqquant.quantize(normal(80, 192).astype(dtype), format)
    x = normal(9, 80 if contract_rows else 192).astype(dtype)
    out = product(
        x, q, dtype=dtype, precision="high", contract_rows=contract_rows
    ).astype(jnp.float32)
    exact = eqquant.dequantize_tree(dataclasses.replace(q, dtype=jnp.dtype("float32")))
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    expected = wide @ np.asarray(exact if contract_rows else exact.T, np.float64)
    # Two operands and the result are rounded by at most half a unit in the last place.
    assert relative(out, expected) < {"bfloat16": 4e-3, "float16": 5e-4}[dtype]


# Short sums of int8 are computed in bfloat16, and long ones in int8.
@pairs("format, m, size", [Int8(), Ternary(), NF4()], [3, 40], [128, 1088])
def test_w8a8_matches_the_portable_lowering(format, m, size, normal):
    q = eqquant.quantize(normal(24, size), format, activations="int8")
    x = normal(m, size)
    out = product(x, q, contract_rows=False)
    assert relative(out, product(x, q, by=PORTABLE, contract_rows=False)) < 1e-5


@pytest.mark.parametrize("size", [1, 8, 1040, 1041])
def test_sums_of_int8_are_exact(size, rng):
    a, b = (rng.integers(-127, 128, (rows, size)) for rows in (5, 7))
    a[0] = b[0] = 127  # The largest sum. The last bits of longer ones are rounded.
    narrow = (jnp.asarray(x.T, jnp.int8) for x in (a, b))
    static = {"over": (-2, -2), "has": (False, False), "out_dtype": jnp.float32}
    out = jax.jit(ft.partial(_codes_dot._on_gpu, **static))(*narrow)
    np.testing.assert_array_equal(out, np.float32(a @ b.T))


@pytest.mark.parametrize(
    "flags, size, multiplied",
    [
        ("", 1152, "int8"),
        ("", 1024, "bfloat16"),
        ("--xla_gpu_autotune_level=0", 1152, "bfloat16"),
        ("--xla_gpu_deterministic_ops", 1152, "bfloat16"),
    ],
)
def test_int8_needs_measured_tiles(flags, size, multiplied, normal, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    q = eqquant.quantize(normal(24, size), "int8", activations="int8")
    variant = _portable._variant_of(
        Matmul(q.format, compute=q.compute).of(
            jnp.zeros((40, size), jnp.int8), q.codes, q.scales
        )
    )
    assert variant == ("fused", multiplied)


@pytest.mark.parametrize("m", [2, 6])
def test_stacks_and_nonfinite_values(m, normal):
    q = eqquant.quantize(normal(3, 16, 64), "nf4")
    x = normal(3, m, 64)
    out = product(x, q, precision="high", contract_rows=False)
    expected = np.einsum("bmk,bnk->bmn", np.asarray(x), np.asarray(q.dequantize()))
    assert relative(out, expected) < 2e-5
    large = product(x * 1e38, q, precision="high", contract_rows=False)
    assert np.isfinite(large).any()
    lost = product(x.at[0, 0, 0].set(jnp.nan), q, precision="high", contract_rows=False)
    assert np.isnan(lost[0, 0]).all() and not np.isnan(lost[1:]).any()


@pytest.mark.parametrize(
    "size, each, multiple",
    [
        (7, 100, 1),
        (9, 100, 8),
        (4096, 28672, 128),
        (14336, 8192, 128),
        (2**20, 2**16, 128),
        (64, 2**30, 8),
    ],
)
def test_a_tile_is_never_the_whole_weight(size, each, multiple):
    for room in (0, 10**6, size * each // 3, 2 * size * each):
        tile = _tiles.tile_size(size, each, multiple, room)
        assert tile % multiple == 0 and tile < size
        assert -(-size // tile) <= 16
    if size * each <= 2**27:  # Large enough for two tiles.
        assert -(-size // tile) == 2


# On an unknown chip.
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a Triton kernel is chosen")
@pytest.mark.parametrize("shape", [(16, 64), (16, 1024)])
def test_a_single_block_of_columns_uses_the_portable_loop(shape, normal):
    q = eqquant.quantize(normal(*shape), NF4(block_size=shape[1]))
    how = eqquant.debug.explain(lambda x: x @ q, normal(8, 16), platform="gpu")
    assert "XLA, recipe 'float'" in how and "would be all of it" in how


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a Triton kernel is chosen")
def test_turned_off(monkeypatch, normal):
    q = eqquant.quantize(normal(8, 64), "nf4")
    explain = ft.partial(eqquant.debug.explain, lambda x: x @ q.T, normal(2, 64))
    assert "XLA for GPUs, variant 'reduce, float32'" in explain(platform="gpu")
    monkeypatch.setenv("EQQUANT_GPU", "off")
    assert "recipe 'float'" in explain(platform="gpu")
    assert "EQQUANT_GPU=off" in explain(platform="gpu")


@pytest.mark.parametrize("platform, loops", [("gpu", False), ("cpu", True)])
def test_a_gpu_encodes_without_a_loop(platform, loops, monkeypatch):
    monkeypatch.setattr(_encode, "platform_of", lambda _: platform)
    at_once = _encode.elements_at_once(jnp.zeros(8), NF4())
    weight = jax.ShapeDtypeStruct((3, 2**20), jnp.float32)
    lowered = _encode.encode_rows.lower(weight, NF4(), (-1,), at_once)
    assert ("stablehlo.while" in lowered.as_text()) == loops


def described(rows, columns, format, dtype="bfloat16"):
    return jax.eval_shape(
        ft.partial(eqquant.quantize, format=format, check_finite=False),
        jax.ShapeDtypeStruct((rows, columns), dtype),
    )


@needs_gpu_compiler
@pytest.mark.parametrize(
    "format, m, contract_rows, chip",
    [
        (NF4(), 1, False, "h100"),
        (Int8(), 16, True, "a100"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (NF4(), 16, True, "h100"),
                (NF4(), 2048, False, "a100"),
                (Int8(), 2048, False, "h100"),
                (Ternary(), 16, False, "h100"),
                (eqquant.Binary(), 1, True, "a100"),
            ]
        ],
    ],
)
def test_few_kernels_and_no_float_weight(format, m, contract_rows, chip):
    q = described(4096, 14336, format)
    x = jax.ShapeDtypeStruct((m, 4096 if contract_rows else 14336), jnp.bfloat16)
    matmul = Matmul(format, contract_rows, q.compute, q.dtype, x.dtype)
    product = lambda x, q: dot_by((gpu.PORTABLE,))(x, q.codes, q.scales, matmul=matmul)
    program = compile_for_gpu(product, x, q, chip=chip)
    assert "while" not in program.launches.lower()
    weight = weight_of(q)
    flows = [Flow(data=True), Flow({weight: weight.decoded}), Flow()]
    assert decoded_in_hlo(program.as_text(), flows) == []
    assert program.num_launches <= {"int8": 3}.get(format.name, 24)
    assert all(kernel.spilled == 0 for kernel in program.kernels)
    # A tile and, for many rows, the parts of the result.
    held = program.compiled.memory_analysis().temp_size_in_bytes
    assert held < 2.5 * 2**25 + 4 * m * 14336


@needs_gpu_compiler
@pytest.mark.parametrize(
    "dtype, format, launches",
    [
        ("bfloat16", NF4(), 6),
        pytest.param("float16", NF4(), 6, marks=pytest.mark.slow),
        pytest.param("bfloat16", eqquant.Binary(), 5, marks=pytest.mark.slow),
    ],
)
def test_compiled_tiles_reuse_the_memory_of_the_result(dtype, format, launches):
    q = described(14336, 4096, format, dtype)
    x = jax.ShapeDtypeStruct((2048, 4096), dtype)
    matmul = Matmul(format, False, q.compute, q.dtype, x.dtype)
    product = lambda x, q: dot_by((gpu.PORTABLE,))(x, q.codes, q.scales, matmul=matmul)
    program = compile_for_gpu(product, x, q, chip="a100")
    # Two kernels decode, two multiply, one concatenates, and one creates an iota.
    assert program.num_launches <= launches
    result = 2 * 2048 * 14336
    held = program.compiled.memory_analysis().temp_size_in_bytes
    assert held < 1.01 * result  # The parts, which are as large as a tile here.
