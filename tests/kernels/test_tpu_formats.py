"""Test how the TPU kernels decode codes."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, FP8, Int3, Int4, MXFP4, NF2, NF4
from eqquant.debug import compile_for_tpu
from eqquant.formats import Codebook, Int5, Int6
from eqquant.kernels.tpu import _chips, _circuit, _tiles, _two_parts, _weights
from helpers import kernels_in, needs_compiler, slow, unpacked
from jax.experimental import pallas as pl


@pytest.mark.parametrize("block_size", [64, 96, 16])
@pytest.mark.parametrize("format", [Int3, Int5, Int6])
def test_codes_in_two_parts_are_unpacked(format, block_size, normal):
    if format is Int3 and block_size == 16:
        pytest.skip("blocks of 3-bit codes are whole words")
    q = eqquant.quantize(normal(32, 3072), format(block_size=block_size))
    used = _two_parts.used_bytes(q.codes.shape[1], q.format)
    assert used == 3072 // _tiles.planes_of(q.format)
    assert used % _tiles.tile_multiple(q.format) == 0
    assert _two_parts.stored_bytes(used, q.format) == q.codes.shape[1]

    def kernel(codes, out):
        out[...] = _two_parts.read(codes, 0, used, q.format)

    out = jax.ShapeDtypeStruct((32, used), jnp.uint8)
    got = np.asarray(pl.pallas_call(kernel, out_shape=out, interpret=True)(q.codes))
    if format is Int3:
        got = got.reshape(32, -1, block_size // 2)
        codes = np.concatenate([got >> 1 & 7, got >> 5], -1).reshape(32, -1)
    else:
        codes = got >> (8 - q.format.bits)
    np.testing.assert_array_equal(codes, unpacked(q))


def test_tables_of_integers_are_looked_up_once():
    integers = (MXFP4(), Codebook((-3, -1, 0, 4)), Codebook((0, 127)))
    assert all(map(_weights.is_exact, integers))
    assert not any(map(_weights.is_exact, (NF4(), Codebook((-1, 0.123, 1)), Int4())))
    chip = _chips._fifth_e
    for format in (*integers, NF4(), NF2(), Codebook((-30, 1, 2.5))):
        levels = np.asarray(format.codebook)
        for kind in ("int8", "float8"):
            for digits in (1, 2):
                decoder = _weights.Decoder(format, chip, kind, digits)
                tables = [
                    jnp.asarray(t.view(decoder.dtype), jnp.float32)
                    for t in decoder._entries
                ]
                got = np.asarray(decoder.combine(tables)) * decoder.scale
                error = np.max(np.abs(got - levels)) / np.max(np.abs(levels))
                exact = format in integers[:2]
                assert error < (
                    1e-6 if exact and digits == 1 else (6e-2, 1e-3)[digits - 1]
                )


def test_a_table_by_logic():
    (table,), _ = _weights._int8_digits(tuple(NF4().codebook), 1)
    circuit = _circuit.circuit_of(tuple(map(int, table)))
    codes = np.random.default_rng(0).integers(0, 256, (128, 128), np.uint8)

    def kernel(codes, out):
        parts = [codes[i : i + 32, :] for i in range(0, 128, 32)]
        for plane, decoded in enumerate(circuit.decode(parts)):
            out[plane] = jnp.concatenate(decoded)

    out = jax.ShapeDtypeStruct((2, 128, 128), jnp.int8)
    got = pl.pallas_call(kernel, out_shape=out, interpret=True)(codes)
    np.testing.assert_array_equal(got, table[np.stack([codes & 15, codes >> 4])])


def test_subclasses_with_other_levels_are_not_decoded_as_integers():
    class Halved(Int4):
        def levels(self, codes, dtype):
            return super().levels(codes, dtype) / 2

    class Tenth(FP8):
        def levels(self, codes, dtype):
            return super().levels(codes, dtype) / 10

    for format, chip in ((Halved(), _chips._sixth), (Tenth(), _chips._seventh)):
        assert not _weights.can_become("int8", format, chip)
        assert not _weights.can_become("float8", format, chip)


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        ("v5e", Binary(), 8),
        ("v6e", Binary(), 8),
        slow(("v5p", Binary(), 8)),
        slow(("v6e", Binary(), 24)),
        slow(("v5e", Int3(), 8)),
        slow(("v5e", Int3(), 256)),
        slow(("v5e", Int5(), 8)),
        slow(("v6e", Int6(), 8)),
        slow(("v5e", Int6(block_size=16), 256)),
        slow(("v6e", Int4(), 8)),
        slow(("v6e", Int3(), 8)),
        slow(("v5p", FP8(), 8)),
        slow(("v5e", FP8(kind="e5m2"), 256)),
    ],
)
def test_decoding_compiles(case):
    chip, format, m = case
    q = jax.eval_shape(
        lambda: eqquant.quantize(jnp.ones((1024, 1024)), format, check_finite=False)
    )
    x = jax.ShapeDtypeStruct((m, 1024), jnp.bfloat16)
    compiled = compile_for_tpu(lambda x, q: x @ q.T, x, q, chip=chip)
    kernel = "decode" if m <= 32 else "columns"
    assert kernels_in(compiled) == [f"{format.name}_{kernel}"]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22
