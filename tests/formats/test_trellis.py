"""Trellis codes: a level depends on the codes before it."""

import zlib
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.formats import Trellis
from eqquant.kernels import choose, cpu, gpu, Matmul
from helpers import (
    assert_identical,
    exported,
    multiply_by,
    pairs,
    relative,
    sqnr,
    strict,
    TOLERANCE,
)
from jax.sharding import NamedSharding, PartitionSpec as P


SMALL = Trellis(bits=2, block_size=32)
BITS = pytest.mark.parametrize("bits", [2, 3, 4])


def natural_codes(packed: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Return codes `(rows, size)`, unpacked by the documented layout."""
    rows = len(packed)
    blocks = packed.reshape(-1, block * bits // 8)
    low_bits = 2 if bits == 3 else bits
    low = blocks[:, : block * low_bits // 8]
    shifts = np.arange(0, 8, low_bits)
    codes = (low[:, :, None] >> shifts & (2**low_bits - 1)).reshape(len(blocks), -1)
    if bits == 3:
        high = blocks[:, len(low[0]) :]
        half = block // 2
        codes[:, :half] |= (high[:, :, None] >> [0, 2, 4, 6] & 1).reshape(-1, half) << 2
        codes[:, half:] |= (high[:, :, None] >> [1, 3, 5, 7] & 1).reshape(-1, half) << 2
    return codes.reshape(rows, -1)


def decoded(q) -> np.ndarray:
    """Decode in float64, code by code, from the masks."""
    from eqquant.formats._trellis import _halves, _masks

    bits, block = q.format.bits, q.format.block_size
    half = np.array(_halves[bits])
    table = np.concatenate([half, -half[::-1]])
    out = natural_codes(np.asarray(q.codes), bits, block).astype(float)
    for row in out:
        window = 0
        for i, code in enumerate(row):
            window = 0 if i % block == 0 else window << bits & 0xFFF
            window |= int(code)
            index = 0
            for mask in _masks[bits]:
                index = 2 * index + (window & mask).bit_count() % 2
            row[i] = table[index]
    return out * np.repeat(np.float64(q.scales), block, -1)


@BITS
@pytest.mark.parametrize("block_size", [256, 24])
def test_decoding_follows_the_documented_layout(bits, block_size, rng):
    format = Trellis(bits=bits, block_size=block_size)
    packed = rng.integers(0, 256, (2, 2 * block_size * bits // 8), dtype=np.uint8)
    scales = jnp.asarray(rng.uniform(1, 2, (2, 2)), jnp.bfloat16)
    q = eqquant.arrays.from_components(jnp.asarray(packed), scales, format)
    # One rounding to float32.
    np.testing.assert_allclose(q.dequantize(), decoded(q), rtol=2.0**-23)


# Checksums of the decoded levels of fixed codes. Files contain only codes and scales,
# so a change of the masks or tables would decode older files to other weights.
@pytest.mark.parametrize(
    "bits, checksum", [(2, 1935554509), (3, 356473293), (4, 1926756381)]
)
def test_files_keep_their_levels(bits, checksum):
    count = 64 * 256 * bits // 8
    packed = (np.arange(count, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)
    q = eqquant.arrays.from_components(
        jnp.asarray(packed[None]), jnp.ones((1, 64), jnp.bfloat16), Trellis(bits=bits)
    )
    levels = np.asarray(q.dequantize()).astype(np.int8)
    assert len(np.unique(levels)) > 2 ** (bits + 2)
    assert zlib.crc32(levels.tobytes()) == checksum


# Prototypes and the documentation state these numbers. The variance of the squared
# errors of 2**15 values contributes 0.05 decibels.
@pytest.mark.parametrize("bits, expected", [(2, 11.33), (3, 17.13), (4, 22.63)])
def test_signal_to_noise_on_normal_weights(bits, expected, normal):
    w = normal(128, 256)
    q = eqquant.quantize(w, f"trellis{bits}")
    assert 8 * q.nbytes / q.size == bits + 0.0625
    assert abs(sqnr(q.dequantize(), w) - expected) < 0.15


@BITS
def test_no_other_codes_are_better(bits, rng):
    # Blocks of 8 values: history reaches their start, so every code sequence of the
    # last values can be tried.
    format = Trellis(bits=bits, block_size=8)
    w = jnp.asarray(rng.standard_normal((1, 8)).astype(np.float32))
    scale = jnp.full((1, 1), 1 / 50, jnp.bfloat16)
    q = eqquant.quantize(w, format, scales=scale.astype(jnp.float32))
    codes = natural_codes(np.asarray(q.codes), bits, 8)[0]
    best = float(jnp.sum((q.dequantize() - w) ** 2))
    free = 3
    tails = np.indices((2**bits,) * free).reshape(free, -1).T.astype(np.uint8)
    every = np.concatenate([np.tile(codes[:-free], (len(tails), 1)), tails], 1)
    every = every.astype(np.uint8)
    packed = format.pack(jnp.asarray(every))
    scales = jnp.full((len(every), 1), scale[0, 0])
    others = eqquant.arrays.from_components(packed, scales, format).dequantize()
    errors = jnp.sum((others - w) ** 2, -1)
    # Up to float32 rounding of the sums.
    assert best <= float(errors.min()) * (1 + 1e-5)


def test_decoded_values_are_kept_if_the_scales_are(normal):
    q = eqquant.quantize(normal(4, 64), SMALL)
    scales = q.scales.astype(jnp.float32)
    again = eqquant.quantize(q.dequantize(), SMALL, scales=scales)
    assert_identical(again.dequantize(), q.dequantize())


def test_quantizing_again_changes_little(normal):
    w = normal(8, 64)
    first = eqquant.quantize(w, SMALL)
    again = eqquant.quantize(first.dequantize(), SMALL)
    change = relative(again.dequantize(), first.dequantize())
    assert change < relative(first.dequantize(), w)


def test_zeros_and_the_ends_of_the_range_of_floats(normal):
    w = normal(3, 64).at[0].set(0).at[1].multiply(1e37).at[2].multiply(1e-35)
    d = eqquant.quantize(w, SMALL).dequantize()
    assert (d[0] == 0).all()
    assert sqnr(d[1], w[1]) > 8 and sqnr(d[2], w[2]) > 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 5}, r"Trellis: bits must be one of \(2, 3, 4\), got 5"),
        ({"bits": True}, "Trellis: bits must be one of"),
        ({"block_size": None}, "block_size must be a positive multiple of 8, got None"),
        ({"block_size": 20}, "block_size must be a positive multiple of 8, got 20"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Trellis(**options)


def test_names():
    assert eqquant.quantize(jnp.ones((1, 8)), "trellis3").format == Trellis(bits=3)
    with pytest.raises(ValueError, match="Did you mean 'trellis2'"):
        eqquant.quantize(jnp.ones((1, 8)), "trelis2")


#
# Structure
#


def test_slices_of_rows_and_between_blocks_are_views_of_components(normal):
    q = eqquant.quantize(normal(6, 96), SMALL)
    d = q.dequantize()
    for index in (slice(1, 4), (slice(None), slice(32, 96))):
        part = strict(lambda q, index=index: q[index])(q)
        assert isinstance(part, eqquant.QuantizedArray)
        assert_identical(part.dequantize(), d[index])
    for index in (2, jnp.array([3, 0])):
        assert_identical(q[index], d[index])
    with pytest.raises(eqquant.MaterialiseError):
        strict(lambda q: q[:, 16:48])(q)  # A history would be lost.


def test_a_partial_block_is_padded(normal):
    w = normal(4, 40)
    q = eqquant.quantize(w, SMALL)
    assert q.shape == (4, 40) and q.codes.shape == (4, 16)
    assert sqnr(q.dequantize(), w) > 9
    x = normal(2, 40)
    expected = np.float64(x) @ np.float64(q.dequantize()).T
    assert relative(x @ q.T, expected) < TOLERANCE["high"]


@pytest.mark.parametrize("m", [1, 8])
def test_products_with_blocks_of_different_sizes_in_turn(normal, m):
    """The native kernels keep what they prepare for a table of levels."""
    w, x = normal(16, 512), normal(m, 512)
    for block_size in (256, 64, 512, 256):
        q = eqquant.quantize(w, Trellis(bits=3, block_size=block_size))
        expected = np.float64(x) @ np.float64(q.dequantize()).T
        assert relative(x @ q.T, expected) < TOLERANCE["high"]


def test_rows_are_independent(normal):
    w = normal(4, 64)
    q = eqquant.quantize(w, SMALL)
    assert_identical(eqquant.quantize(w[1:2], SMALL), q[1:2])


def test_other_axes_stacks_scans_and_rows_of_a_table(normal):
    w = normal(2, 32, 16)
    q = eqquant.quantize(w, SMALL, axis=1)
    assert sqnr(q.dequantize(), w) > 9
    stacked = eqx.filter_vmap(lambda w: eqquant.quantize(w, SMALL))(normal(3, 32, 32))
    body = lambda x, w: (jnp.tanh(x @ w.T), None)
    x = normal(32)
    out, _ = strict(lambda x, s: jax.lax.scan(body, x, s))(x, stacked)
    expected, _ = jax.lax.scan(body, x, stacked.dequantize())
    assert relative(out, expected) < TOLERANCE["high"]
    table = eqquant.quantize(normal(10, 32), SMALL)
    rows = jax.jit(strict(lambda q, i: jnp.take(q, i, 0)))(table, jnp.array([7, 1]))
    assert_identical(rows, table.dequantize()[jnp.array([7, 1])])


def test_files(tmp_path, normal):
    model = {"w": eqquant.quantize(normal(8, 64), Trellis(bits=3, block_size=64))}
    path = tmp_path / "model.safetensors"
    eqquant.save(path, model)
    assert_identical(eqquant.load(path), model)
    assert "trellis" in str(eqquant.report(model))


#
# Products
#


@pairs("bits, precision, m", [2, 3, 4], ["highest", "high", "default"], [1, 5])
def test_products_in_both_directions(bits, precision, m, normal):
    format = Trellis(bits=bits, block_size=64)
    q = eqquant.quantize(normal(24, 128), format, precision=precision)
    d = np.float64(q.dequantize())
    x, y = normal(m, 128), normal(m, 24)
    assert relative(x @ q.T, np.float64(x) @ d.T) < TOLERANCE[precision]
    assert relative(y @ q, np.float64(y) @ d) < TOLERANCE[precision]


def test_gradients_for_activations_and_scales(normal):
    q = eqquant.quantize(normal(16, 64), SMALL, precision="highest")
    x, ct = normal(3, 64), normal(3, 16)
    loss = lambda x, s: jnp.sum((x @ q.replace(scales=s).T) * ct)
    scales = q.scales.astype(jnp.float32)
    by_x, by_scale = jax.grad(loss, (0, 1))(x, scales)
    d = np.float64(q.dequantize())
    assert relative(by_x, np.float64(ct) @ d) < TOLERANCE["highest"]
    weight_gradient = np.float64(ct).T @ np.float64(x)
    expected = (weight_gradient * d).reshape(16, 2, 32).sum(-1) / np.float64(scales)
    assert relative(by_scale, expected) < TOLERANCE["highest"]


def test_vmap_int8_activations_and_export(normal):
    q = eqquant.quantize(normal(16, 64), SMALL)
    x = normal(4, 3, 64)
    product = lambda x: x @ q.T
    assert relative(jax.vmap(product)(x), x @ q.dequantize().T) < TOLERANCE["high"]
    (out,) = exported(lambda x, q: x @ q.T, x, q)
    assert relative(out, x @ q.dequantize().T) < TOLERANCE["high"]
    rounded = x @ eqquant.with_compute(q, activations="int8").T
    assert relative(rounded, x @ q.dequantize().T) < TOLERANCE["default"]


@pytest.mark.parametrize("transposed", [False, True])
def test_no_product_decodes_the_whole_weight(transposed, normal):
    q = eqquant.quantize(normal(64, 64), SMALL)
    multiply = lambda x, w: x @ (w if transposed else w.T)
    eqquant.debug.assert_not_materialised(multiply, normal(2, 64), q)


@pytest.mark.parametrize("spec", [P("m"), P(None, "m")])
def test_shards(spec, normal):
    q = eqquant.quantize(normal(16, 128), SMALL, precision="highest")
    mesh = jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    split = eqquant.shard_tree(q, mesh, spec)
    assert not split.codes.sharding.is_fully_replicated
    x = jax.device_put(normal(2, 128), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x, q: x @ q.T)(x, split)
    assert relative(out, x @ q.dequantize().T) < TOLERANCE["highest"] * 2
    assert_identical(split.dequantize(), q.dequantize())


def test_half_a_block_is_no_shard(normal):
    q = eqquant.quantize(normal(16, 32), SMALL)
    assert not q.can_split(1, 2) and q.can_split(0, 2)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("m, contract_rows", [(1, False), (6, False), (6, True)])
def test_products_by_xla_for_gpus(bits, m, contract_rows, normal):
    format = Trellis(bits=bits, block_size=24)
    q = eqquant.quantize(normal(16, 96), format)
    x = normal(m, 16 if contract_rows else 96)
    matmul = Matmul(format, contract_rows)
    out = multiply_by(gpu.PORTABLE, matmul, x, q.codes, q.scales)
    w = np.float64(q.dequantize())
    expected = np.float64(x) @ (w if contract_rows else w.T)
    assert relative(out, expected) < TOLERANCE["high"]


@pytest.mark.skipif(isinstance(cpu.load(), str), reason="no native kernels here")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for CPUs")
@pairs(
    "bits, precision, m, block_size, blocks",
    *([2, 3, 4], ["high", "highest", "default"], [1, 3, 40], [256, 24, 64], [2, 1]),
)
@pytest.mark.parametrize("contract_rows", [False, True])
def test_native_kernels(bits, precision, m, block_size, blocks, contract_rows, rng):
    format, rows = Trellis(bits=bits, block_size=block_size), 40
    packed = rng.integers(0, 256, (rows, blocks * block_size * bits // 8), np.uint8)
    scales = jnp.asarray(rng.uniform(1, 2, (rows, blocks)), jnp.bfloat16)
    q = eqquant.arrays.from_components(jnp.asarray(packed), scales, format)
    x = rng.standard_normal((m, rows if contract_rows else blocks * block_size))
    x = jnp.asarray(x, jnp.float32)
    matmul = Matmul(format, contract_rows).with_compute(precision=precision)
    kernel = choose(cpu.KERNELS, matmul.of(x, q.codes, scales))
    if isinstance(kernel, str) and "XLA is faster" in kernel:
        pytest.skip(kernel)
    out = jax.jit(lambda *args: multiply_by(cpu.KERNELS, matmul, *args))(
        x, q.codes, scales
    )
    w = np.float64(q.dequantize())
    expected = np.float64(x) @ (w if contract_rows else w.T)
    assert relative(out, expected) < TOLERANCE[precision]


#
# Calibration
#


def calibrated(format, **options):
    model = eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(1))
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(64, 64)) / np.arange(1, 65)[:, None]
    x = jnp.asarray(rng.normal(size=(256, 64)) @ directions, jnp.float32)
    stats = eqquant.calibrate(lambda m, x: jax.vmap(m)(x), model, [x])
    q = eqquant.quantize_tree(model, format, calibration=stats, **options)
    weight: Any = q.weight
    error = weight.dequantize() - model.weight
    return float(jnp.sum((x @ error.T) ** 2)), weight


@pytest.mark.slow
@pytest.mark.parametrize("rotate", [False, True])
def test_gptq_searches_along_the_trellis(rotate):
    format = Trellis(bits=2, block_size=64)
    after, q = calibrated(format, rotate=rotate)
    before, _ = calibrated(format, method="nearest", rotate=rotate)
    nf2, _ = calibrated(eqquant.NF2(), rotate=rotate)
    assert after < 0.25 * before and after < 0.75 * nf2
    assert (q.base if rotate else q).format == format


@pytest.mark.slow
def test_a_wider_search_is_better():
    format = Trellis(bits=2, block_size=64)
    narrow, _ = calibrated(format, search=4)
    wide, _ = calibrated(format, search=64)
    assert wide < narrow
