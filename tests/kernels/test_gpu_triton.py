"""Test the Triton kernel: its values in interpret mode, its choice, and its check."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, FP8, Int3, Int4, Int8, NF3, NF4, NVFP4, Ternary
from eqquant.formats import Codebook, Int5, Int6, Trellis
from eqquant.kernels import choose, Compute, gpu, GPUKernel, Matmul, View
from eqquant.kernels.gpu import _check, _chips, _triton
from helpers import assert_identical, multiply_by, pairs, relative, slow


FORMATS = [NF4(), Int8(), Ternary(), Binary(), Int4(), Int8(block_size=64)]
FORMATS += [Int3(), NF3(), Int5(), Int6(), Int5(block_size=None)]
FORMATS += [Trellis(bits=2), Trellis(bits=3), Trellis(bits=4, block_size=128)]
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def on(monkeypatch):
    """Set the GPU to compile for, or with a capability, the GPU that is present."""

    def set(kind=H100, capability=None):
        monkeypatch.setattr(_chips, "gpu_capability", lambda: (kind, capability))

    set()
    _check._failure_of.cache_clear()
    yield set
    _check._failure_of.cache_clear()


def small(m: int, contract_rows: bool, split: int):
    """Return small tiles, so that ragged shapes have several."""

    def tiles_for(chip, product, native, parts):
        format = product.format
        return _triton.Tiles(
            m=16,
            rows=16,
            bytes=_triton.subtile_bytes(format, 16 if format.bits < 8 else 32),
            subtiles=2 if contract_rows or format.bits == 4 else 1,
            split=split,
        )

    return tiles_for


@pytest.mark.slow
@pairs(
    "format, dtypes, m, contract_rows, split",
    FORMATS,
    ["float32 high", "bfloat16 high", "float16 high", "float32 default"],
    [3, slow(17)],
    [False, True],
    [1, 2],
)
def test_ragged_products(
    format, dtypes, m, contract_rows, split, on, normal, monkeypatch
):
    monkeypatch.setattr(_chips, "tiles_for", small(m, contract_rows, split))
    check_ragged(format, dtypes, m, contract_rows, normal)


@pairs(
    "format, bytes, dtypes, split",
    [
        *[Int4(), NF4(block_size=32), Int8(block_size=16), Ternary(block_size=64)],
        *[Int5(), Int6(block_size=16), NF4(block_size=16)],
    ],
    [32, slow(64)],
    ["float32 high", "bfloat16 high", "float16 high"],
    [1, 2],
)
def test_ragged_products_with_several_blocks_in_a_subtile(
    format, bytes, dtypes, split, on, normal, monkeypatch
):
    tiles = _triton.Tiles(m=16, rows=16, bytes=bytes, subtiles=2, split=split)
    assert bytes >= 2 * _triton.subtile_bytes(format, 64)
    monkeypatch.setattr(_chips, "tiles_for", lambda *_, **__: tiles)
    check_ragged(format, dtypes, 3, False, normal)


def check_ragged(format, dtypes, m, contract_rows, normal):
    """Compare a product with a weight of shape (45, 200) with float64."""
    dtype, precision = dtypes.split()
    q = eqquant.quantize(normal(45, 200).astype(dtype), format)
    x = normal(m, 45 if contract_rows else 200).astype(dtype)
    missing = q.codes.shape[1] * 8 // format.bits - 200
    out = multiply_by(
        gpu.KERNELS,
        Matmul(format, contract_rows, Compute(precision), q.dtype),
        x if contract_rows else jnp.pad(x, ((0, 0), (0, missing))),
        q.codes,
        q.scales,
        interpret=True,
    )[:, : 200 if contract_rows else None]
    w = np.asarray(_exact(q), np.float64)
    expected = np.asarray(x, np.float64) @ (w if contract_rows else w.T)
    # Operands have 16, 11 or 8 significant bits.
    bound = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 4e-3}[dtype]
    assert relative(out, expected) < (6e-3 if precision == "default" else bound)


@pairs(
    "format, contract_rows, stacked_scales, split",
    [NF4(), Int8(), Int5(), Trellis(bits=3)],
    [False, True],
    [True, False],
    [1, 2],
)
def test_layers_of_a_stack_are_read_in_place(
    format, contract_rows, stacked_scales, split, on, normal, monkeypatch
):
    """Results equal the results for slices, bit for bit."""
    monkeypatch.setattr(_chips, "tiles_for", small(3, contract_rows, split))
    q = eqquant.quantize(normal(3, 2, 64, 256), format)
    x = normal(2, 3, 64 if contract_rows else 256)
    matmul = Matmul(format, contract_rows)
    view = View(jnp.int32(1), q.codes, q.scales if stacked_scales else None)
    own = view.take((q.codes, q.scales))
    out = multiply_by(gpu.KERNELS, matmul, x, *own, interpret=True, view=view)
    assert_identical(out, multiply_by(gpu.KERNELS, matmul, x, *own, interpret=True))


MANY = [NF4(), Int4(block_size=64), Int8(block_size=64), Ternary(block_size=128)]


@pairs(
    "format, rows, m, chip",
    [*MANY, Int8(), Ternary(), Binary()],
    [45, slow(300)],
    [129, slow(150)],
    ["NVIDIA GeForce RTX 4090, 8.9", "NVIDIA GeForce RTX 3090, 8.6"],
)
def test_many_rows_of_blocks_that_are_scaled_in_16_bits(
    format, rows, m, chip, on, normal, monkeypatch
):
    """Use the chosen tiles with partial tiles of both operands and a partial block."""
    on(*chip.split(", "))
    monkeypatch.setattr(_check, "failure_of", lambda *_, **__: None)
    q = eqquant.quantize(normal(rows, 200).astype("bfloat16"), format)
    missing = q.codes.shape[1] * 8 // format.bits - 200
    x = jnp.pad(normal(m, 200), ((0, 0), (0, missing))).astype("bfloat16")
    matmul, args = Matmul(format, weight_dtype=q.dtype), (x, q.codes, q.scales)
    chosen = gpu.choose(matmul.of(*args))
    assert chosen.tiles.m == 128 and chosen.tiles.scaled == bool(format.block_size)
    out = multiply_by(gpu.KERNELS, matmul, *args, interpret=True)
    w = np.asarray(_exact(q), np.float64)
    expected = np.asarray(x[:, :200], np.float64) @ w.T
    # A level, a scale and their product are rounded to bfloat16.
    assert relative(out, expected) < (4e-3 if format.block_size else 2e-3)


LONG = [NF4(), Int4(), Int8(block_size=64), Ternary(block_size=64), Int8(), Binary()]
LONG += [Int3(), Int5(), Int6(), Int6(block_size=16)]


@pairs("format, m, width", LONG, [3, slow(21), slow(40)], [200, slow(1300)])
def test_long_rows_with_several_blocks(format, m, width, on, normal, monkeypatch):
    """Use the chosen tiles with partial tiles of both operands and a partial block."""
    on(H100, "9.0")
    monkeypatch.setattr(_check, "failure_of", lambda *_, **__: None)
    q = eqquant.quantize(normal(77, width).astype("bfloat16"), format)
    missing = q.codes.shape[1] * 8 // format.bits - width
    x = jnp.pad(normal(m, width), ((0, 0), (0, missing))).astype("bfloat16")
    matmul, args = Matmul(format, weight_dtype=q.dtype), (x, q.codes, q.scales)
    chosen = gpu.choose(matmul.of(*args)).tiles
    # Binary codes take 32 bytes for 64 rows.
    assert chosen.step_bytes >= 32 and chosen.scaled == bool(format.block_size)
    out = multiply_by(gpu.KERNELS, matmul, *args, interpret=True)
    w = np.asarray(_exact(q), np.float64)
    expected = np.asarray(x[:, :width], np.float64) @ w.T
    # A level, a scale and their product are rounded to bfloat16.
    assert relative(out, expected) < (4e-3 if format.block_size else 2e-3)


@pytest.mark.parametrize("m, split", [(3, 1), (21, 2)])
def test_integers_are_multiplied_exactly(m, split, on, monkeypatch):
    monkeypatch.setattr(_chips, "tiles_for", small(m, False, split))
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (2, m, 200)).astype(np.int8)
    codes = rng.integers(-127, 128, (2, 45, 200)).astype(np.int8)
    scales, units = (rng.uniform(0.5, 2, (2, n, 1)).astype("f4") for n in (45, m))
    out = multiply_by(
        gpu.KERNELS,
        Matmul(Int8(), compute=Compute(activations="int8")),
        *map(jnp.asarray, (x, codes, scales, units)),
        interpret=True,
    )
    expected = x.astype(np.float64) @ codes.swapaxes(1, 2).astype(np.float64)
    assert relative(out, expected * scales.swapaxes(1, 2) * units) < 3e-7


def _exact(q):
    levels = q.format.levels(q.format.ordered_states(q.codes), jnp.float32)
    scales = jnp.repeat(q.scales, levels.shape[1] // q.scales.shape[1], 1)
    return (levels * scales)[:, : q.shape[1]]


def test_stacks_and_nonfinite_rows(on, normal, monkeypatch):
    monkeypatch.setattr(_chips, "tiles_for", small(3, False, 1))
    q = eqquant.quantize(normal(2, 20, 64), "nf4")
    x = normal(2, 3, 64).at[0, 1, 5].set(jnp.nan).at[1, 0, 0].set(jnp.inf)
    args = x, q.codes, q.scales
    out = multiply_by(gpu.KERNELS, Matmul(q.format), *args, interpret=True)
    expected = np.einsum("bmk,bnk->bmn", np.asarray(x), np.asarray(q.dequantize()))
    assert np.array_equal(np.isnan(out).all(-1), [[0, 1, 0], [0, 0, 0]])
    assert not np.isfinite(out[1, 0]).any()
    fine = np.isfinite(expected)
    assert relative(out[fine], expected[fine]) < 2e-5


#
# Choice of the kernel
#


def test_few_rows_have_several_short_blocks_in_a_subtile():
    of = lambda m, format: tiles(chip, m, (4096, 2048), format=format)
    chip = _chips.known(H100)
    assert chip is not None
    spanned = {m: of(m, Int4()).bytes // 16 for m in (1, 16, 64, 65)}
    assert spanned == {1: 8, 16: 8, 64: 8, 65: 4}
    assert of(1, Int4(block_size=96)).bytes == 16
    chip = _chips.known("NVIDIA A100-SXM4-80GB")
    assert chip is not None
    spanned = {m: of(m, Int4()).bytes // 16 for m in (1, 16, 64, 65)}
    assert spanned == {1: 2, 16: 2, 64: 2, 65: 1}
    assert of(1, Int8(block_size=16)).bytes == 32
    assert of(1, Int4(block_size=16)).bytes == 16
    assert of(1, Int4(block_size=8)) is None
    # The activation of 64 rows exceeds shared memory.
    chip = _chips.known("NVIDIA GeForce RTX 4090", "8.9")
    assert chip is not None and of(64, Int4()).m == 32
    # A subtile never ends inside of a block.
    assert of(1, Int4(block_size=96)).bytes == 16


def explained(m=8, dtype="float32", format="nf4", rows=False, **fields):
    compute = Compute(**fields)
    q = eqquant.quantize(jnp.ones((64, 64), dtype), format, compute=compute)
    return eqquant.debug.explain(
        lambda x: x @ (q if rows else q.T), jnp.ones((m, 64), dtype), platform="gpu"
    )


@pytest.mark.parametrize(
    "kind, capability, expected",
    [
        ("NVIDIA A100-SXM4-80GB", None, "for sm_80, few rows, bfloat16 three times"),
        ("NVIDIA GeForce RTX 4090", None, "for sm_89"),
        (H100, None, "for sm_90"),
        ("NVIDIA B200", None, "no kernels for 'NVIDIA B200'"),
        ("cpu", None, "no kernels for 'cpu'"),
    ],
)
def test_by_chip(kind, capability, expected, on):
    on(kind, capability)
    assert expected in explained()


@pytest.mark.slow
def test_by_shape_and_dtype(on, monkeypatch):
    assert "few rows, bfloat16 (activations not rounded)" in explained(dtype="bfloat16")
    assert "few rows, float16 (activations not" in explained(dtype="float16")
    assert "bfloat16 three times (activations rounded to 16 bits)" in explained(
        dtype="float16", rows=True
    )
    assert "64 rows, bfloat16 twice" in explained(m=40, format="ternary")
    assert "looked up in shared memory" in explained()
    assert "codes as signs" in explained(format="binary")
    assert "codes converted" in explained(format="int8")
    assert "for more than 128 rows" in explained(m=200)
    assert "128 rows" in explained(m=200, gpu=GPUKernel("triton"))
    many = dict(m=200, format="ternary")
    assert "256 rows, bfloat16" in explained(**many, dtype="bfloat16")
    assert "256 rows, float16" in explained(**many, dtype="float16")
    assert "for more than 128 rows" in explained(**many)
    assert "256 rows" not in explained(**many, dtype="bfloat16", rows=True)
    assert "compute.gpu" in explained(gpu=GPUKernel("xla"))
    assert "too short for tensor cores" in explained(format=NF4(block_size=8))
    assert "no kernels for codes like those of fp8" in explained(format=FP8())
    # The four codes of a register do not have the same position.
    few = "no kernels for codes like those of int5"
    assert few in explained(format=Int5(block_size=8))
    for format in Int3(), Int5(), Int6(), Int6(16, double_quantization="k"):
        assert "bfloat16 twice" in explained(format=format)
        assert "codes converted" in explained(format=format)
    assert "bfloat16 three times" in explained(format=NVFP4())
    assert "in shared memory" in explained(format=NF3())
    how = explained(format=Int6(block_size=16), rows=True)
    assert "blocks of 16 are too short for tensor cores" in how
    assert "no multiple of 16 words" in explained(
        format=Trellis(bits=2, block_size=192)
    )
    assert "Triton" in explained(format=Int5(), rows=True)
    assert "does not decode codes of 6 bits" in explained(
        format=Int6(), dtype="bfloat16", gpu=GPUKernel("mosaic")
    )
    assert "do not multiply float32" in explained(precision="highest")
    rounded = dict(format="int8", activations="int8")
    assert "few rows, int8 (activations rounded to 8 bits)" in explained(**rounded)
    assert "256 rows, int8" in explained(m=200, **rounded)
    for options in ({"rows": True}, {"format": "ternary"}):
        assert "integers with whole rows of int8 only" in explained(**rounded | options)
    on("NVIDIA A100-SXM4-80GB")
    assert "for more than 128 rows" in explained(**many, dtype="bfloat16")
    # The A100 writes and reads integer sums fast.
    assert "for more than 128 rows" in explained(m=200, **rounded)
    assert "XLA" in explained(m=200, dtype="bfloat16")
    on("NVIDIA GeForce RTX 4090")
    assert "128 rows, int8" in explained(m=200, **rounded)
    for format in "int8", "nf4", "ternary", "binary":
        many = dict(m=200, format=format)
        how = "Triton kernel for sm_89, 128 rows, bfloat16"
        assert how in explained(**many, dtype="bfloat16")
        # The kernel scales blocks in bfloat16 only.
        served = format != "nf4"
        assert ("128 rows, float16" in explained(**many, dtype="float16")) == served
        assert "for more than 128 rows" in explained(**many)
        assert "Triton" not in explained(**many, dtype="bfloat16", rows=True)
    assert "in shared memory and scaled" in explained(m=200, dtype="bfloat16")
    # A plane has too few numbers, or a lookup needs too many planes.
    few = Int4(), Binary(block_size=64), NF4(block_size=32), Codebook((-1.0, 0.5))
    for format in few:
        assert "for more than" in explained(m=200, format=format, dtype="bfloat16")
    # Tensor cores of this chip are twice as fast as on GeForce chips.
    on("NVIDIA L40S", "8.9")
    monkeypatch.setattr(_check, "failure_of", lambda *_, **__: None)
    assert "for sm_89" in explained(m=8, dtype="bfloat16")
    assert "for more than" in explained(m=200, dtype="bfloat16")
    monkeypatch.setenv("EQQUANT_GPU", "xla")
    assert "variant 'tiles, bfloat16'" in explained()
    assert "because EQQUANT_GPU=xla" in explained()


@pytest.mark.parametrize(
    "chip, dtype, expected",
    [
        (H100, "bfloat16", "bfloat16"),
        (H100, "float32", "float32"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", "float32"),
    ],
)
def test_scales_that_multiply_the_weight_are_decoded_to_its_dtype(
    chip, dtype, expected, on
):
    on(chip)
    q = eqquant.quantize(jnp.ones((64, 256), dtype), Int6(16, double_quantization="k"))
    product = Matmul(q.format, weight_dtype=q.dtype, out_dtype=dtype).of(
        jnp.ones((8, 256), dtype), q.codes, q.scales
    )
    kernel = choose(gpu.KERNELS, product)
    assert kernel.name == "Triton" and kernel.scale_dtype(product) == expected


def test_arrays_that_exceed_32_bit_indices_use_xla(on):
    shapes = ((8, 2**16), "float32"), ((2**16, 2**15), "uint8"), ((2**16, 2**10), "f4")
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    reason = choose(gpu.KERNELS, Matmul(NF4()).of(*operands))
    assert "the kernels count in 32 bits" in reason


def tiles(chip, m, codes, dtype="bfloat16", format=FORMATS[0]):
    rows, packed = codes
    columns = packed * 8 // format.bits
    shapes = (m, columns), codes, (rows, columns // (format.block_size or columns))
    dtypes = dtype, format.code_dtype, "float32"
    operands = map(jax.ShapeDtypeStruct, shapes, dtypes)
    return _chips.tiles_for(chip, Matmul(format).of(*operands))


def test_tiles_fit_into_shared_memory():
    def of(capability, m, dtype="bfloat16", format=FORMATS[0]):
        codes = 14336, 4096 * format.bits // 8
        return tiles(_chips.known("", capability), m, codes, dtype, format)

    assert (of("8.0", 1).rows, of("8.0", 1).stages) == (256, 4)
    assert (of("9.0", 1).rows, of("9.0", 1).bytes) == (64, 256)
    assert [of("9.0", m).m for m in (16, 17, 64, 128, 500)] == [16, 32, 64, 128, 128]
    # Less shared memory means fewer stages, then fewer rows of the activation.
    assert (of("8.9", 32).stages, of("8.9", 32, "float32").stages) == (4, 3)
    assert of("8.9", 128).m == 64 and of("8.9", 128, "float32").m == 32
    # A program for part of a row needs several steps.
    assert (of("8.0", 1).split, of("8.0", 1, format=Binary()).split) == (4, 2)
    assert of("8.0", 17).split == 1
    # Tiles with few rows of the weight fill the chip.
    assert of("9.0", 1).split == 1
    assert tiles(_chips.known("", "9.0"), 1, (8192, 4096)).split == 2


#
# The check
#


def correct(product, x, codes, scales, *units, **_):
    matmul = Matmul(
        product.format,
        product.contract_rows,
        Compute("highest"),
        out_dtype=product.out_dtype,
    )
    x = x.astype(jnp.float32)
    for unit in units:
        x = x * unit
    return _check.xla.dot(x, codes, scales, matmul)


def test_a_correct_kernel_is_used(on, monkeypatch):
    on(H100, "9.0")
    monkeypatch.setattr(_triton, "dot", correct)
    assert "Triton kernel for sm_90" in explained()
    assert "few rows, int8" in explained(format="int8", activations="int8")
    before = _check._failure_of.cache_info().misses
    assert "Triton kernel for sm_90" in explained(m=4)
    assert _check._failure_of.cache_info().misses == before  # Cached.


@pairs(
    "format, dtype, rows",
    [
        *(Int3(), Int5(), Int6(block_size=64), Int5(block_size=None)),
        *(Trellis(bits=bits) for bits in (2, 3, 4)),
    ],
    ["float32", "bfloat16"],
    [False, True],
)
def test_the_check_passes_for_codes_in_several_bytes(format, dtype, rows, on):
    on(H100, "9.0")
    how = explained(format=format, dtype=dtype, rows=rows)
    assert "Triton kernel for sm_90" in how
    assert _check._failure_of.cache_info().misses == 1


def raises(*_, **__):
    raise NotImplementedError("no such instruction")


@pytest.mark.parametrize(
    "wrong, reason",
    [
        (lambda *a, **k: correct(*a, **k).at[:, :, -1].mul(1.1), "relative error is"),
        (lambda *a, **k: correct(*a, **k) * jnp.nan, "relative error is nan"),
        (raises, "NotImplementedError: no such instruction"),
    ],
)
def test_an_incorrect_kernel_is_not_used(wrong, reason, on, monkeypatch):
    on(H100, "9.0")
    monkeypatch.setattr(_triton, "dot", wrong)
    with pytest.warns(UserWarning, match=f"failed its check .*{reason}"):
        how = explained()
    assert "XLA for GPUs" in how and reason in how
    with pytest.warns(UserWarning, match="few rows, int8.* failed its check"):
        assert "XLA for GPUs" in explained(format="int8", activations="int8")
    assert "Triton kernel" in explained(gpu=GPUKernel(check=False))
    with pytest.warns(UserWarning, match="failed its check"):
        q = eqquant.quantize(jnp.ones((64, 64)), "ternary")
        traced = jax.jit(lambda x: x @ q.T).trace(jnp.ones((8, 64)))
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "triton" not in lowered.as_text()
