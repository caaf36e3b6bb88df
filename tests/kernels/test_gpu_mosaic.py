"""Test the Mosaic kernel: its values in interpret mode, the addresses that its PTX
computes, and the choice of the kernel."""

import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int4, Int8, NF4, Ternary
from eqquant.formats import Codebook
from eqquant.kernels import Compute, gpu, GPUKernel, Matmul, View
from eqquant.kernels.gpu import (
    _check,
    _chips,
    _choose,
    _fragment_ptx,
    _kernel,
    _lookup,
    _mosaic,
    _pipeline,
    _table,
)
from helpers import assert_identical, multiply_by, relative, slow
from test_gpu_ptx import _parsed, BASE, Emulator
from test_gpu_triton import correct, H100, on as on


MOSAIC = Compute(gpu=GPUKernel("mosaic", check=False))
FORMATS = [
    NF4(),
    *map(
        slow,
        [
            Int8(),
            Int4(),
            Ternary(),
            Binary(),
            Int8(block_size=128),
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_ragged_products(format, on, normal, monkeypatch):
    """Use two programs, two tiles in one of them, and more steps than stages."""
    small = ft.partial(_pipeline.Pipeline, m=32, stages=3)
    monkeypatch.setattr(_pipeline, "pipeline_for", lambda *_: small(cores=2))
    size = 512 if format.block_size == 128 else 256
    q = eqquant.quantize(normal(320, size).astype("bfloat16"), format)
    x = normal(30, size).astype("bfloat16")
    args, matmul = (x, q.codes, q.scales), Matmul(format, False, MOSAIC, *2 * [q.dtype])
    chosen = _choose.choose(matmul.of(*args))
    assert isinstance(chosen, _kernel.TensorCoreKernel)
    out = multiply_by(gpu.KERNELS, matmul, *args, interpret=True)
    assert out.dtype == jnp.bfloat16
    w = np.asarray(q.astype(jnp.float32).dequantize(), np.float64)
    # The result is rounded. With blocks, so are scales, levels and their products.
    blocked = q.scales.shape[1] > 1
    bound = 4e-3 if blocked else 2.5e-3
    assert relative(out, np.asarray(x, np.float64) @ w.T) < bound


@pytest.mark.slow
@pytest.mark.parametrize("stacked_scales", [True, False])
@pytest.mark.parametrize(
    "format", [NF4(), Int8(), Int8(block_size=64), Ternary()], ids=str
)
def test_layers_of_a_stack_are_read_in_place(
    format, stacked_scales, on, normal, monkeypatch
):
    """Results equal the results for slices, bit for bit. The last tile of rows is
    partial, and copies rows of the next matrix of the stack."""
    small = ft.partial(_pipeline.Pipeline, m=32, stages=2)
    monkeypatch.setattr(_pipeline, "pipeline_for", lambda *_: small(cores=2))
    q = eqquant.quantize(normal(3, 192, 256).astype("bfloat16"), format)
    x = normal(30, 256).astype("bfloat16")
    matmul = Matmul(format, False, MOSAIC, *2 * [q.dtype])

    def multiply(i, in_place):
        view = View(i, q.codes, q.scales if stacked_scales else None)
        args = (gpu.KERNELS, matmul, x, *view.take((q.codes, q.scales)))
        options = {"view": view} if in_place else {}
        return multiply_by(*args, interpret=True, **options)

    compiled = jax.jit(multiply, static_argnums=1)  # Once for both layers.
    for i in (jnp.int32(0), jnp.int32(2)):
        assert_identical(compiled(i, True), compiled(i, False))


@pytest.mark.slow
@pytest.mark.parametrize("m", [30, slow(260)])
def test_integers_are_multiplied_exactly(m, on, monkeypatch):
    """Use up to nine tiles of rows; groups have eight."""
    small = _pipeline.Pipeline(m=32, stages=2, cores=6)
    monkeypatch.setattr(_pipeline, "pipeline_for", lambda *_: small)
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (m, 384), np.int8)
    codes = rng.integers(-127, 128, (192, 384), np.int8)
    scales, units = (np.float32(rng.uniform(0.5, 2, (n, 1))) for n in (192, m))
    compute = MOSAIC.updated(activations="int8")
    out = multiply_by(
        gpu.KERNELS,
        Matmul(Int8(), False, compute, "bfloat16", "bfloat16"),
        *map(jnp.asarray, (x, codes, scales, units)),
        interpret=True,
    )
    exact = np.float64(x) @ np.float64(codes).T * scales.T * units
    assert relative(out, exact) < 2.5e-3  # The result is rounded.


@pytest.mark.parametrize("m", [1, 253, slow(511)])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_any_number_of_rows_is_lowered(m, activations, on):
    """Copies from swizzled rows take multiples of eight rows."""
    compute = MOSAIC.updated(activations=activations)
    q = eqquant.quantize(jnp.ones((128, 128), "bfloat16"), "int8", compute=compute)
    traced = jax.jit(lambda x, q: x @ q.T).trace(jnp.ones((m, 128), "bfloat16"), q)
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    assert lowered.out_info.shape == (m, 128)


#
# Addresses
#


class Places(Emulator):
    """Emulate threads. A load from shared memory returns its address."""

    def _step(self, name, operands, values):
        if name == "ld.shared.u16":
            register, _, offset = operands[1].strip("[]").partition("+")
            values[operands[0]] = values[register] + int(offset)
        else:
            super()._step(name, operands, values)

    def of(self, asm: str, *args: int, thread: int = 0, results: int = 1) -> list[int]:
        registers = {f"${results + i}": arg for i, arg in enumerate(args)}
        self.emulate(asm, registers | {"%tid.x": thread, "$0": 0})
        return [self.values[f"${i}"] for i in range(results)]

    def emulate(self, asm, registers):
        self.values = dict(registers)
        for name, operands in _parsed(asm):
            self._step(name, operands, self.values)
        return 0


def swizzled(place: int, width: int) -> int:
    """Swizzle an address in rows of `width` bytes: XOR the index of its 16 bytes with
    the index of its 128-byte line."""
    return place ^ ((place >> 7) & (width // 16 - 1)) << 4


@pytest.mark.parametrize(
    "format", [NF4(), Int4(), Int8(), Ternary(), Binary()], ids=str
)
def test_threads_read_the_codes_of_their_columns(format, normal):
    width = _pipeline.width_of(format)
    per = width * 8 // format.bits
    codes = np.random.default_rng(0).integers(0, 2**format.bits, (128, per), np.uint8)
    packed = codes
    if format.bits < 8:
        groups = codes.reshape(128, -1, format.group)
        packed = eqquant.formats.pack(jnp.asarray(groups), format.bits)
        packed = np.asarray(packed).reshape(128, width)
    memory = {swizzled(i, width): int(b) for i, b in enumerate(packed.ravel())}
    assert sorted(memory) == list(range(128 * width))
    places, base = Places(), 4096
    for thread in range(0, 256, 5):
        row = thread // 32 * 16 + thread % 32 // 4
        text = _fragment_ptx.place_of_codes(width)
        at = places.of(text, base, thread=thread, results=2)
        for half in range(2):
            for q, columns in enumerate(_fragment_ptx.columns_of(format)):
                text = _fragment_ptx.load_codes(8 * q, 8 * width * half)
                (found,) = places.of(text, *at)
                for byte in range(2):
                    loaded = memory[found - base + byte]
                    for plane, column in enumerate(columns):
                        code = loaded >> plane * format.bits & 2**format.bits - 1
                        column = 8 * column + 2 * (thread % 4) + byte
                        assert code == codes[row + 8 * half, column]
    assert sorted(np.ravel(_fragment_ptx.columns_of(format))) == list(range(8))


def test_threads_read_the_scales_of_their_rows():
    for thread in range(256):
        row = thread // 32 * 16 + thread % 32 // 4
        places = Places().of(_fragment_ptx.place_of_scale(), 512, thread=thread)
        assert places == [512 + 16 * row]


def test_results_are_written_in_rows_of_the_activation():
    """One instruction stores four 8 x 8 matrices. Eight lanes have the addresses of the
    rows of each."""
    base, places = 16384, set()
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        (at,) = Places().of(_fragment_ptx.place_of_result(), base, thread=thread)
        pair, half, row = lane // 16, lane // 8 % 2, lane % 8
        for columns in range(0, 8, 2):
            found = at + 1024 * columns - base
            row_of_x = 8 * (columns + pair) + row
            place = row_of_x * 128 + 2 * (16 * warp + 8 * half)
            assert found == swizzled(place, 128)
            places.add(found)
    # Every 16 bytes of 64 rows of 64 numbers are written once.
    assert places == set(range(0, 64 * 128, 16))


def test_each_thread_fills_its_part_of_the_table():
    for thread in range(384):
        place, entry = Places().of(
            _fragment_ptx.place_of_entry, thread=thread, results=2
        )
        assert place == 16 * (thread % 128) and entry == place // 128


@pytest.mark.parametrize("format", [NF4(), Codebook((-1.0, -0.3, 0.5, 1.0))], ids=str)
def test_the_table_is_at_the_given_address(format):
    decoder = _lookup.Decoder(format, "bfloat16", 1, interpret=False)
    emulator, bits = Emulator(), format.bits
    emulator.size = _table.size_of(bits)
    text = _table.filling_of(decoder.tables, bits, 128)
    text = _fragment_ptx.with_table_at(text, "$3")
    pairs = _table.first_pairs(decoder.tables[0], bits).view("<u4")
    for thread in range(128):
        at, entry = Places().of(_fragment_ptx.place_of_entry, thread=thread, results=2)
        emulator.emulate(text, {"$1": at, "$2": int(pairs[entry]), "$3": BASE})
    assert len(emulator.shared) * 4 == emulator.size
    for two in np.random.default_rng(0).integers(0, 2**16, 20):
        for plane in range(8 // bits):
            text = _fragment_ptx.with_table_at(decoder.texts(plane)[0], "$2")
            registers = {"$1": int(two), "$2": BASE, "%laneid": int(two) % 32}
            found = np.array([emulator.emulate(text, registers)["$0"]], "<u4")
            codes = [two >> shift + plane * bits & 2**bits - 1 for shift in (0, 8)]
            expected = decoder.tables[0][codes]
            assert np.array_equal(found.view("<u2"), expected.view("<u2"))


#
# Choice of the kernel
#


def explained(m, dtype, format, kernel=None, rows=False):
    compute = Compute(gpu=kernel)
    q = eqquant.quantize(jnp.ones((128, 128), dtype), format, compute=compute)
    return eqquant.debug.explain(
        lambda x: x @ (q if rows else q.T), jnp.ones((m, 128), dtype), platform="gpu"
    )


def test_by_shape_and_dtype(on):
    many = ft.partial(explained, 200, "bfloat16")
    for format in "int8", "ternary", "binary":
        assert "Mosaic kernel for sm_90, 256 rows, bfloat16" in many(format)
        assert "Mosaic kernel" in explained(65, "bfloat16", format)
        assert "Mosaic" not in explained(64, "bfloat16", format)
        assert "Mosaic" not in explained(200, "float32", format)
        assert "Mosaic" not in many(format, rows=True)
    # The scales of a row of 128 weights have 8 bytes.
    assert "for more than 128 rows" in many("nf4")
    why = many("nf4", GPUKernel("mosaic"))
    assert "requests Mosaic: the scales of a row must be a multiple of 16 bytes" in why
    for format, reason in [
        (NF4(block_size=128), "groups of 64 codes, not of 128"),
        (Ternary(block_size=64), "does not support blocks of 64"),
    ]:
        assert reason in many(format, MOSAIC.gpu)
    assert "it is for many rows on Hopper" in explained(
        200, "float32", "nf4", GPUKernel("mosaic")
    )
    assert "Triton kernel" in many("ternary", GPUKernel("triton"))
    assert "Mosaic kernel" in explained(3, "bfloat16", "ternary", MOSAIC.gpu)
    on("NVIDIA A100-SXM4-80GB")
    assert "Mosaic" not in many("int8")


def test_the_pipeline_fits_in_shared_memory():
    shared = _chips.known("", "9.0").shared
    pipeline = _pipeline.Pipeline()
    for format in NF4(), Int4(), Int8(), Int8(block_size=64), Ternary(), Binary():
        assert 100_000 < _pipeline.bytes_of(pipeline, format, 64, 2) <= shared
    pipeline = _pipeline.pipeline_for(Int8(), jnp.dtype("int8"), 1)
    assert 100_000 < _pipeline.bytes_of(pipeline, Int8(), 1, 1) <= shared


@pytest.mark.parametrize("factor", [1, 1.1])
def test_the_check(factor, on, monkeypatch):
    on(H100, "9.0")
    kernel = lambda *args, **options: factor * correct(*args, **options)
    monkeypatch.setattr(_mosaic, "dot", kernel)
    if factor == 1:
        assert "Mosaic kernel" in explained(200, "bfloat16", "ternary")
    else:
        with pytest.warns(UserWarning, match="failed its check .* relative error is"):
            how = explained(200, "bfloat16", "ternary")
        assert "XLA" in how
    assert _check._failure_of.cache_info().misses == 1
