"""The native kernels: their results, and their choice."""

import concurrent.futures

import eqquant
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import (
    Binary,
    FP8,
    Int3,
    Int4,
    Int8,
    MXFP4,
    NF3,
    NF4,
    NVFP4,
    Ternary,
)
from eqquant.formats import Int2, Int5, Int6, Trellis
from eqquant.kernels import Compute, cpu, Matmul, round_int8, xla
from eqquant.kernels.cpu._call import call, has_small_levels, unpacked_bits
from helpers import assert_identical, pairs, relative, slow


# The documented error of each kernel, with a margin for small shapes.
TOLERANCE = {
    "float, AVX2": 3e-6,
    "float, AVX-512": 3e-6,
    "int16, AVX2": 2e-4,
    "int8, AVX2": 4e-2,
    "int8x2, VNNI": 2e-4,
    "int8, VNNI": 4e-2,
    "int16, VNNI": 2e-4,
    "int8x2, AMX": 2e-4,
    "int8, AMX": 4e-2,
    "bfloat16, AMX": 1e-2,
    "float, NEON": 3e-6,
    "int8x2, dotprod": 2e-4,
    "int8, dotprod": 4e-2,
    "int8x2, i8mm": 2e-4,
    "int8, i8mm": 4e-2,
}

library = cpu.load()
needs_library = pytest.mark.skipif(
    isinstance(library, str), reason=f"NATIVE KERNELS NOT RUN: {library}"
)


def runs(kernel):
    """Return whether this CPU has the instructions at the end of a kernel name."""
    needs = kernel.split(", ")[-1].lower().replace("-", "")
    return not isinstance(library, str) and needs in library.instructions


KERNELS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not runs(name), reason=f"NATIVE KERNEL NOT RUN: {name}"
        ),
    )
    for name in TOLERANCE
]
# Kernels for AMX tiles, and kernels that also contract rows.
IN_TILES = ("int8x2, AMX", "int8, AMX")
IN_BOTH_DIRECTIONS = [
    name
    for name in TOLERANCE
    if name.startswith(("float, ", "int16, V")) or name in IN_TILES
]
# int8 kernels for codes of 8 bits.
OF_INT8 = [k for k in KERNELS if "int8" in k.values[0] and k.values[0] != "int8, AVX2"]
DIRECTIONS = [
    pytest.param(*kernel.values, contract_rows, marks=kernel.marks)
    for kernel in KERNELS
    for contract_rows in (False, True)
    if not contract_rows or kernel.values[0] in IN_BOTH_DIRECTIONS
]


def exact(kernel):
    """Return whether a kernel requires integer levels, and one scale per row or codes
    of 8 bits in long blocks."""
    return "int8x2" in kernel and kernel not in IN_TILES


def serves(kernel, format, blocks, packed, contract_rows):
    block = packed // blocks
    if kernel.startswith("float"):
        return True
    if kernel in IN_TILES:
        return blocks == 1 or block % 16 == 0 or (block == 8 and format.bits < 8)
    if format.float8:
        return False
    if exact(kernel):
        is_long = unpacked_bits(format) == 8 and block >= 128 and block % 4 == 0
        one = blocks == 1 or (kernel == "int8x2, VNNI" and is_long)
        return not contract_rows and format.integer_levels and one
    if kernel.endswith("AVX2"):
        if kernel.startswith("int8") and not has_small_levels(format):
            return False
        halves = 8 if unpacked_bits(format) == 4 else 16, 16
        return not contract_rows and (blocks == 1 or block in halves or block % 32 == 0)
    if "int8" in kernel:
        return not contract_rows
    if "int16" in kernel:
        if contract_rows:
            return packed % 16 == 0 and (blocks == 1 or block == 8 or block % 16 == 0)
        return blocks == 1 or 64 % block == 0 or block % 64 == 0
    return not contract_rows and (blocks == 1 or block % 16 == 0)


def both(kernel, x, codes, scales, format, contract_rows=False):
    """Return the product by the native kernel, and by XLA at the highest precision."""
    matmul = Matmul(format, contract_rows, Compute("highest"))
    native = jax.jit(lambda *args: call(kernel, matmul.of(*args), *args))
    reference = jax.jit(lambda *args: xla.dot(*args, matmul))
    return native(x, codes, scales), reference(x, codes, scales)


def draw_product(data, kernel):
    """Draw an activation and a weight with random codes, from a few compiled shapes."""
    only_integers = exact(kernel)
    formats = [Int3, Int4, Int5, Int6, Int8, Ternary, Binary]
    if not only_integers:
        formats += [NF4, NF3]
    if kernel.startswith("float") or kernel in IN_TILES:
        formats += [FP8]
    if kernel == "int8, AVX2":
        formats = [Int2, Int3, Int4, Ternary, Binary]
    make = data.draw(st.sampled_from(formats))
    in_blocks = not only_integers
    if kernel == "int8x2, VNNI":
        in_blocks = make in (Int5, Int6, Int8)
    blocks_of = [None, 128, 256] if in_blocks else [None]
    format = make(
        block_size=data.draw(st.sampled_from(blocks_of)),
        scale_dtype=data.draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    )
    batch = data.draw(st.sampled_from([(), (3,)]))
    # Tiles of blocks need 8 rows.
    least = 8 if kernel in ("int16, VNNI", "int16, AVX2", "int8, AVX2") else 1
    limits = (1, 40), (least, 70), (1, 600)
    m, rows, columns = (data.draw(st.integers(*limit)) for limit in limits)
    # With few sums, cancellation can affect all of them.
    hypothesis.assume(m * rows >= 50)
    contract_rows = kernel in IN_BOTH_DIRECTIONS and data.draw(st.booleans())
    if contract_rows and not kernel.startswith("float"):
        # Whole registers: for int16 of all formats, for tiles of codes of 8 bits.
        whole = 128 if kernel == "int16, VNNI" else 16 if format.bits == 8 else 1
        columns = (columns + whole - 1) // whole * whole
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    stored = format.padded(columns)
    dtype = format.code_dtype
    codes = rng.integers(0, 256, (*batch, rows, stored * format.bits // 8))
    if format.float8:
        codes[codes & 127 == 127] = 0  # NaN.
        codes[..., 0] = 0x77  # Quantized rows contain a large value.
    scales = 0.5 + rng.random((*batch, rows, format.num_blocks(columns)))
    scales *= rng.choice([-1, 1], scales.shape)  # Like GGUF's Q4_0.
    x = rng.standard_normal((*batch, m, rows if contract_rows else stored))
    x = jnp.asarray(x, data.draw(st.sampled_from(["float32", "bfloat16"])))
    scales = jnp.asarray(scales, format.scale_dtype)
    return x, jnp.asarray(codes.astype(dtype)), scales, format, contract_rows


@pytest.mark.parametrize("kernel", KERNELS)
@hypothesis.settings(max_examples=5)
@hypothesis.given(data=st.data())
def test_any_shape_against_xla(kernel, data):
    x, codes, scales, format, contract_rows = draw_product(data, kernel)
    got, expected = both(kernel, x, codes, scales, format, contract_rows)
    assert relative(got, expected) < TOLERANCE[kernel]


@pairs("kernel, m", KERNELS, [3, slow(21), 150])
def test_products_large_enough_for_several_threads(kernel, m, normal):
    # The last format has blocks of eight bytes, two per vector.
    short = Ternary(block_size=32)
    for format in (NF4(), Int8(), Ternary(), Binary(), Int3(), Int6(), short):
        q = eqquant.quantize(normal(523, 1024), format)
        for contract_rows in (False, True):
            blocks = q.scales.shape[-1]
            bytes = 1024 * unpacked_bits(format) // 8
            if not serves(kernel, format, blocks, bytes, contract_rows):
                continue
            x = normal(m, 523 if contract_rows else 1024)
            got, expected = both(kernel, x, q.codes, q.scales, format, contract_rows)
            assert relative(got, expected) < TOLERANCE[kernel]


@pytest.mark.skipif(not runs("int8x2, VNNI"), reason="NATIVE KERNEL NOT RUN")
@pytest.mark.parametrize("format", [Int8(block_size=128), Trellis(bits=2)], ids=repr)
def test_codes_in_long_blocks_are_exact(format, normal):
    """Only the activation is rounded, to 15 bits of its largest number, even if the
    scales of a row are very different."""
    factors = 10.0 ** np.arange(-3, 3).repeat(256)
    q = eqquant.quantize(normal(130, 1536) * factors, format)
    # Values that the kernel rounds to themselves.
    x = np.asarray(normal(70, 1536) * 32).round().clip(-127, 127)
    x[:, 0] = 127
    args = jnp.asarray(x, jnp.float32), q.codes, q.scales
    matmul = Matmul(q.format, False)
    got = call("int8x2, VNNI", matmul.of(*args), *args)
    expected = x.astype(np.float64) @ np.asarray(q.dequantize(), np.float64).T
    # Sums of floats.
    assert relative(got, expected) < 1e-6


@pytest.mark.parametrize("kernel, contract_rows", DIRECTIONS)
def test_a_batch_is_split_between_threads(kernel, contract_rows, normal):
    """Each thread computes whole products if their rows are short, as in a cache of
    keys and values. Each product equals the product alone, bit for bit."""
    rows, columns, batch = 4096, 64, 5
    for format in (Int4(block_size=64, scale_dtype="float16"), NF4(block_size=32)):
        q = eqquant.quantize(normal(batch, rows, columns), format)
        blocks = q.scales.shape[-1]
        if not serves(kernel, format, blocks, columns // 2, contract_rows):
            continue
        # The magnitudes of one product are out of the range of the kernels.
        huge = np.where(np.arange(batch) == 2, 1e25, 1)[:, None, None]
        if format.scale_dtype == "float32":
            q = q.replace(scales=q.scales * huge.astype(np.float32))
        x = normal(batch, 3, rows if contract_rows else columns)
        x *= jnp.asarray(np.where(huge > 1, 1e-25, 1), x.dtype)
        matmul = Matmul(format, contract_rows, Compute("highest"))
        product = jax.jit(lambda *args, m=matmul: call(kernel, m.of(*args), *args))
        got = product(x, q.codes, q.scales)
        for i in range(batch):
            alone = product(x[i], q.codes[i], q.scales[i])
            np.testing.assert_array_equal(got[i], alone)


def test_products_of_several_threads_at_once(normal):
    """Threads of the pool serve whichever product comes next."""
    product = jax.jit(eqquant.quaxify(lambda q, x: x @ q.T))
    qs = [eqquant.quantize(normal(n, 1024), NF4()) for n in (523, 768, 1024)]
    x = normal(1, 1024)
    expected = [np.asarray(product(q, x)) for q in qs]

    def run(_):
        return [np.asarray(product(q, x)) for q in 20 * qs]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for got in pool.map(run, range(3)):
            for y, z in zip(got, 20 * expected, strict=True):
                np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.values[0] in IN_BOTH_DIRECTIONS]
)
@pytest.mark.parametrize(
    "format",
    [
        Binary(),  # Runs of half a vector.
        Ternary(block_size=32),  # Two blocks per vector.
        slow(Int3(block_size=None)),
        slow(Int4()),
        slow(Int5()),
        Int6(block_size=16),
        slow(Int8(block_size=128)),
        FP8(),
        slow(NF4(block_size=2048)),  # No panel holds a whole run.
    ],
    ids=repr,
)
def test_panels_of_any_rows(kernel, format, rng):
    # Partial panels of rows, and several panels of columns with a partial one.
    # More rows of the activation than a kernel processes at once.
    m, rows, size = 600, 150, 2512 if format.bits == 8 else 2304
    if format.block_size == 2048:
        size = 4096
    w = jnp.asarray(rng.standard_normal((rows, size)), jnp.float32)
    q = eqquant.quantize(w, format)
    exact = np.asarray(q.dequantize(), np.float64)
    blocks = q.scales.shape[-1]
    packed = format.padded(size) * unpacked_bits(format) // 8
    for contract_rows, weight in ((False, exact.T), (True, exact)):
        if not serves(kernel, format, blocks, packed, contract_rows):
            continue
        x = jnp.asarray(rng.standard_normal((m, weight.shape[0])), jnp.float32)
        columns = format.padded(size)
        padded = x if contract_rows else jnp.pad(x, ((0, 0), (0, columns - size)))
        args, matmul = (padded, q.codes, q.scales), Matmul(format, contract_rows)
        got = call(kernel, matmul.of(*args), *args)
        expected = np.asarray(x, np.float64) @ weight
        assert relative(got[:, : expected.shape[1]], expected) < TOLERANCE[kernel]


@pytest.mark.parametrize("columns", [60, 64, 96, 128, 136])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if "int8" in k.values[0]])
@pytest.mark.parametrize("format", [Int4(block_size=None), Int8()], ids=repr)
def test_few_rows_by_short_rows(kernel, columns, format, rng):
    # Keys of a cache. 77 rows leave a part of a vector, and of four rows.
    w = jnp.asarray(rng.standard_normal((77, columns)), jnp.float32)
    q = eqquant.quantize(w, format)
    exact = np.asarray(q.dequantize(), np.float64)
    pad = q.codes.shape[-1] * 8 // format.bits - columns
    if not serves(kernel, format, 1, q.codes.shape[-1], False):
        pytest.skip("the kernel does not serve this format")
    matmul = Matmul(q.format, False)
    for m in (1, 2, 3, 4, 5, 8, 9):
        x = jnp.asarray(rng.standard_normal((m, columns)), jnp.float32)
        args = jnp.pad(x, ((0, 0), (0, pad))), q.codes, q.scales
        got = call(kernel, matmul.of(*args), *args)
        expected = np.asarray(x, np.float64) @ exact.T
        assert relative(got, expected) < TOLERANCE[kernel]


@pytest.mark.parametrize("kernel, contract_rows", DIRECTIONS)
@pytest.mark.parametrize(
    "format",
    [
        NF4(double_quantization=True),
        Int4(affine=True, double_quantization=True),
        Int6(affine=True, double_quantization=True),
        Int6(16, double_quantization="k"),
        MXFP4(),
        NVFP4(),
    ],
    ids=repr,
)
def test_short_scales_are_read_as_they_are_stored(
    kernel, contract_rows, format, normal
):
    """The result has the same bits as with decoded scales."""
    rows, size = 37, 512
    q = eqquant.quantize(normal(rows, size), format)
    blocks, packed = q.scales.shape[-1], size * unpacked_bits(format) // 8
    if exact(kernel) or not serves(kernel, format, blocks, packed, contract_rows):
        pytest.skip("the kernel does not serve this format")
    x = normal(5, rows if contract_rows else size)
    matmul = Matmul(format, contract_rows, Compute("highest"))
    for scales in (q.scales, q.scales.astype(jnp.float32)):
        args = x, q.codes, scales
        results = jax.jit(lambda *args: call(kernel, matmul.of(*args), *args))(*args)
        if scales is q.scales:
            as_stored = results
    assert (as_stored == results).all()


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.values[0] in IN_TILES])
@pytest.mark.parametrize("format", [Int8(), NF4(), FP8()], ids=repr)
def test_rows_of_very_different_size(kernel, format, normal, rng):
    # The largest row is about 30 times an ordinary row. The activation times scales is
    # rounded relative to the largest product. docs/cpu.md has half of this bound.
    w = normal(1024, 512) * np.exp(rng.standard_normal((1024, 1)))
    q = eqquant.quantize(w.astype(jnp.float32), format)
    args = (kernel, normal(64, 1024), q.codes, q.scales, format)
    most = 8e-4 if "int8x2" in kernel else 1e-1
    assert relative(*both(*args, contract_rows=True)) < most


@pytest.mark.parametrize("kernel", OF_INT8)
@pytest.mark.parametrize("m, rows, columns", [(90, 100, 6400), (170, 40, 13000)])
def test_long_rows_are_arranged_fewer_at_a_time(kernel, m, rows, columns, rng):
    # The activation is larger than a kernel processes at once.
    codes = jnp.asarray(rng.integers(-127, 128, (rows, columns)), jnp.int8)
    scales = jnp.asarray(0.5 + rng.random((rows, 1)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((m, columns)), jnp.float32)
    got, expected = both(kernel, x, codes, scales, Int8())
    assert relative(got, expected) < TOLERANCE[kernel]


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.values[0] in ("int8, VNNI", "int8, AVX2")]
)
@pytest.mark.parametrize("format", [NF4(), Int4(), NF4(block_size=256)], ids=repr)
@pytest.mark.parametrize("m", [1, 2])
def test_an_outlier_is_rounded_with_its_block_only(kernel, m, format, normal):
    if not serves(kernel, format, 512 // format.block_size, 256, False):
        pytest.skip("the kernel does not serve this format")
    w = normal(64, 512).at[:, :256].set(0)
    q = eqquant.quantize(w, format)
    x = normal(m, 512).at[:, 3].set(1e4)
    y, reference = both(kernel, x, q.codes, q.scales, format)
    # With one unit per row, the other values would be rounded to zero.
    assert relative(y, reference) < TOLERANCE[kernel]


@pytest.mark.parametrize("kernel", [k for k in OF_INT8 if "int8, " in k.values[0]])
def test_the_least_code_by_a_negative_scale_is_not_the_least_byte(kernel):
    # The value is 128 steps, and the largest code is 127.
    codes = jnp.full((20, 256), -128, jnp.int8)
    scales = jnp.full((20, 2), -0.5)
    x, format = jnp.ones((3, 256)), Int8(block_size=128)
    got, expected = both(kernel, x, codes, scales, format)
    assert relative(got, expected) < TOLERANCE[kernel]


@pytest.mark.parametrize("kernel, contract_rows", DIRECTIONS)
def test_what_is_not_finite_stays_in_its_row(kernel, contract_rows, normal):
    q = eqquant.quantize(normal(128, 128), Int4() if kernel == "int8, AVX2" else Int8())
    for bad in (jnp.nan, jnp.inf):
        x = normal(4, 128).at[1, 77].set(bad)
        got, _ = both(kernel, x, q.codes, q.scales, q.format, contract_rows)
        assert not jnp.isfinite(got[1]).any()
        assert jnp.isfinite(got[jnp.array([0, 2, 3])]).all()


# Other kernels round whole rows.
@pytest.mark.parametrize(
    "kernel, contract_rows",
    [d for d in DIRECTIONS if d.values[0] in IN_BOTH_DIRECTIONS],
)
def test_weights_that_are_not_finite_stay_in_their_block(kernel, contract_rows, normal):
    q = eqquant.quantize(normal(256, 256), NF4())
    columns = slice(64, 128) if contract_rows else slice(3, 4)
    for bad in (jnp.nan, jnp.inf):
        scales = q.scales.at[3, 1].set(bad)
        got, _ = both(kernel, normal(4, 256), q.codes, scales, q.format, contract_rows)
        assert not jnp.isfinite(got[:, columns]).any()
        rest = jnp.delete(got, jnp.arange(256)[columns], axis=1)
        assert jnp.isfinite(rest).all()


# Smaller numbers are subnormal.
MAGNITUDES = [(0, 1), (1e-35, 1), (1e34, 1), (1, 1e-34), (1, 1e34), (1e-30, 1e30)]
MAGNITUDES += [(1e-16, 1e-19), (1e-19, 1e-16)]


@pytest.mark.parametrize("kernel, contract_rows", DIRECTIONS)
@pytest.mark.parametrize("format", [NF4(), Int8(), FP8()], ids=repr)
def test_extreme_magnitudes(kernel, contract_rows, format, normal):
    q = eqquant.quantize(normal(96, 128), format)
    if not serves(kernel, format, q.scales.shape[-1], 128, contract_rows):
        pytest.skip("the kernel does not serve this format")
    x, matmul = normal(4, 96 if contract_rows else 128), Matmul(format, contract_rows)
    product = jax.jit(lambda *args: call(kernel, matmul.of(*args), *args))
    weight = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (weight if contract_rows else weight.T)
    for of_x, of_w in MAGNITUDES:
        got = product(of_x * x, q.codes, of_w * q.scales)
        assert relative(got, of_x * of_w * expected) < TOLERANCE[kernel]


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contract_rows", [False, True])
def test_magnitudes_that_differ_between_rows(contract_rows, dtype, normal):
    q = eqquant.quantize(normal(96, 128), NF4(scale_dtype=dtype))
    of_w = np.where(np.arange(96) % 2, 1e-25, 1e25)[:, None]
    of_x = np.array([1e-8, 1, 0, 1e8])[:, None]
    x = normal(4, 96 if contract_rows else 128) * of_x.astype(np.float32)
    q = q.replace(scales=(q.scales * of_w.astype(np.float32)).astype(dtype))
    got = x @ q if contract_rows else x @ q.T
    weight = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (weight if contract_rows else weight.T)
    # Results of one magnitude.
    halves = [slice(None)] if contract_rows else [slice(0, None, 2), slice(1, None, 2)]
    for row in (0, 1, 3):
        for half in halves:
            assert relative(got[row, half], expected[row, half]) < 1e-2
    assert (got[2] == 0).all()


@pytest.mark.parametrize("kernel, contract_rows", DIRECTIONS)
def test_the_largest_sums_fit(kernel, contract_rows):
    for format in (NF4(), Ternary(block_size=128), Binary(block_size=64), Int8()):
        shape = (2048, 128) if contract_rows else (8, 2048)
        q = eqquant.quantize(jnp.ones(shape), format)
        blocks, packed = q.scales.shape[-1], q.codes.shape[-1]
        if serves(kernel, format, blocks, packed, contract_rows):
            x = jnp.ones((4, 2048))
            got, _ = both(kernel, x, q.codes, q.scales, format, contract_rows)
            assert relative(got, jnp.full(got.shape, 2048.0)) < TOLERANCE[kernel]


def test_other_levels_than_those_of_a_format_are_not_taken_for_integers(normal):
    class Halved(Int8):
        def levels(self, codes, dtype):
            return super().levels(codes, dtype) / 2

    q = eqquant.quantize(normal(16, 64), Int8()).replace(format=Halved())
    x = normal(3, 64)
    assert relative(x @ q.T, x @ q.dequantize().T) < 1e-6  # The order of sums differs.


@needs_library
def test_bad_calls_are_errors(normal):
    q = eqquant.quantize(normal(40, 128), NF4())
    good = dict(
        kernel=f"float, {'AVX2' if runs('AVX2') else 'NEON'}",
        code_layout=np.array([4, 0, 32]),
        scale_types=np.zeros(3, np.int64),
        offset_types=np.array([], np.int64),
        shift=np.float32(0),
        rounds_x=False,
        level_unit=np.float32(0),
        contract_rows=False,
        own_scales=False,
    )
    operands = dict(x=normal(4, 128), codes=q.codes, scales=q.scales)
    operands |= dict(outer=normal(40, 2), offsets=normal(40, 2))
    operands |= dict(outer_offsets=normal(40, 2), levels=normal(16))

    def call(y=(4, 40), scratch=4 * 128 * 4, **changed):
        attributes = {k: changed.get(k, v) for k, v in good.items()}
        args = [changed.get(k, v) for k, v in operands.items()]
        args += [changed["index"]] if "index" in changed else []
        out = (
            jax.ShapeDtypeStruct(y, jnp.float32),
            jax.ShapeDtypeStruct((scratch,), jnp.uint8),
        )
        return jax.ffi.ffi_call("eqquant_dot", out)(*args, **attributes)[0]

    assert call().shape == (4, 40)
    # With an index, codes and scales are stacks. The index is clamped.
    index = jnp.int32(7)
    stacks = {name: operands[name][None] for name in ("codes", "scales")}
    assert_identical(call(index=index, **stacks), call())
    codes = stacks["codes"]
    assert_identical(call(index=index, codes=codes, own_scales=True), call())
    zeros, outer = np.array([0, 0, 0]), np.array([0, 0, 2])
    for changed, message in (
        (dict(kernel="none"), "no kernel"),
        (dict(code_layout=np.array([7, 0, 32])), "bits must be"),
        (dict(code_layout=np.array([3, 0, 32])), "codes must fill"),
        (dict(code_layout=np.array([5, 0, 32])), "codes must fill"),
        (dict(scale_types=np.array([9, 0, 0])), "numbers of ScaleType"),
        (dict(scale_types=np.array([0, 1, 0])), "elements of their type"),
        (dict(offset_types=zeros, offsets=normal(40, 3)), "a scale for each block"),
        (dict(offset_types=zeros[:2]), "must have a type"),
        (dict(scale_types=outer), "an outer scale for each"),
        (dict(code_layout=np.array([4, 4, 32])), "must have 8 bits"),
        (dict(levels=normal(4)), "16 levels"),
        (dict(x=normal(4, 64)), "do not fit"),
        (dict(y=(4, 41)), "do not fit"),
        (dict(y=(3, 40)), "do not fit"),
        (dict(scales=normal(39, 2)), "a scale for each block"),
        (dict(scales=normal(40, 3)), "blocks must divide"),
        (dict(scales=normal(40, 2).astype(jnp.float16)), "elements of their type"),
        (dict(x=normal(4, 128).astype(jnp.float16)), "float32 or bfloat16"),
        (dict(codes=q.codes.astype(jnp.int8)), "codes must be"),
        (dict(code_layout=np.array([4, 0, 7])), "run must divide"),
        (dict(code_layout=np.array([4, 0, 0])), "run must divide"),
        (dict(code_layout=zeros[:1]), "bits, exponent and run"),
        (dict(scratch=100), "scratch is too small"),
        (dict(x=normal(1, 4, 128)), "same number of axes"),
        (dict(index=index), "same number of axes"),
        (dict(index=index, codes=codes), "same number of axes"),
        (stacks | dict(index=index, own_scales=True), "same number of axes"),
        (dict(scale_types=outer, index=index, **stacks), "outer scale"),
        (dict(index=jnp.float32(7), **stacks), "same number of axes"),
        (dict(index=index[None], **stacks), "same number of axes"),
        (stacks | dict(index=index, codes=q.codes[None, None]), "number of axes"),
    ):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call(**changed))


@needs_library
@pytest.mark.parametrize("contract_rows", [False, True])
def test_an_activation_in_bfloat16_is_read_as_it_is(contract_rows, normal):
    q = eqquant.quantize(normal(128, 128), NF4())
    product = lambda x: x @ (q if contract_rows else q.T)
    narrow = normal(20, 128).astype("bfloat16")
    text = jax.jit(product).lower(narrow).as_text()
    (call,) = (line for line in text.splitlines() if "@eqquant_dot" in line)
    assert "tensor<20x128xbf16>" in call
    # The operands are exact in float32, so the result is equal.
    wide = product(narrow.astype("float32"))
    assert relative(product(narrow), wide) < 3e-3


@needs_library
@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("format", [Int8(), NF4(), Int4(affine=True)], ids=str)
def test_kernels_round_int8_activations(format, m, normal):
    """Kernels round the activation, so XLA does not, in both directions."""
    q = eqquant.quantize(normal(64, 128), format, activations="int8")
    for fn, size in ((lambda x: x @ q.T, 128), (lambda x: x @ q, 64)):
        x = normal(m, size)
        text = jax.jit(fn).lower(x).as_text()
        assert "eqquant_dot" in text and "round" not in text.replace("rounds_x", "")
        codes, unit = round_int8(x)
        weight = q.dequantize().T if size == 128 else q.dequantize()
        expected = (codes.astype(jnp.float32) @ weight) * unit
        # Tiles round after a multiplication by scales.
        assert relative(fn(x), expected) < (1e-3 if size == 128 else 2e-2)


@pytest.mark.parametrize("kernel", [p for p in KERNELS if "int16" in p.values[0]])
@pytest.mark.parametrize("format", [Int8(), Int4(32)], ids=str)
def test_activations_in_int8_are_exact_as_int16(kernel, format, normal):
    q = eqquant.quantize(normal(64, 128), format)
    x = normal(2, 128)
    args = x, q.codes, q.scales
    matmul = Matmul(q.format, False, Compute("high", "int8"))
    y = jax.jit(lambda *args: call(kernel, matmul.of(*args), *args, rounds=True))(*args)
    codes, unit = map(np.asarray, round_int8(x))
    expected = (codes @ np.float64(q.dequantize()).T) * unit
    assert relative(y, expected) < 1e-6


@pytest.mark.parametrize("kernel", [p for p in KERNELS if p.values[0] in IN_TILES])
def test_negative_scales_of_float8(kernel, normal):
    q = -eqquant.quantize(normal(20, 64), FP8())
    got, expected = both(kernel, normal(16, 64), q.codes, q.scales, q.format, False)
    assert relative(got, expected) < TOLERANCE[kernel]


@needs_library
def test_explain_says_which_kernel(normal):
    product = lambda x, q: x @ q.T
    explain = lambda *args: eqquant.debug.explain(product, *args, platform="cpu")
    q = eqquant.quantize(normal(40, 128), NF4())
    integers = [name for name in ("int16, VNNI", "int16, AVX2") if runs(name)]
    few = integers[0] if integers else "float, NEON"
    assert f"native kernel '{few}" in explain(normal(1, 128), q)
    # Blocks of twelve bytes do not divide a vector.
    odd = eqquant.quantize(normal(40, 96), NF4(block_size=24), precision="highest")
    assert "rows XLA is faster" in explain(normal(1100, 96), odd)
    short = eqquant.quantize(normal(40, 128), Binary(block_size=16))
    assert "shorter than a register" in explain(normal(1, 128), short)
    with jax.enable_x64(True):
        assert "not in float64" in explain(jnp.ones((1, 128)), q)


@needs_library
def test_the_kernel_is_what_runs_under_jit_and_not_on_a_mesh(normal):
    q = eqquant.quantize(normal(16, 512), NF4())
    x = normal(4, 512)
    product = jax.jit(lambda x, q: x @ q.T)
    assert "eqquant_dot" in product.lower(x, q).as_text()
    gradient = jax.jit(jax.grad(lambda x, q: jnp.sum(jnp.sin(x @ q.T))))
    assert gradient.lower(x, q).as_text().count("@eqquant_dot") == 2
    # The compiler could not partition it.
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(
        q, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )
    assert "eqquant_dot" not in product.lower(x, split).as_text()


@needs_library
def test_what_is_exported_runs_anywhere(normal):
    q = eqquant.quantize(normal(16, 512), NF4())
    exported = jax.export.export(jax.jit(lambda x: x @ q.T))(normal(4, 512))
    assert "eqquant_dot" not in exported.mlir_module()
