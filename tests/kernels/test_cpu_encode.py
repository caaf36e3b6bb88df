"""The native encoder: codes and scales of NF4."""

import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import NF4
from eqquant.arrays.quantized._encode import encode_rows
from eqquant.kernels import cpu
from helpers import assert_identical


library = cpu.load()
needs_encoder = pytest.mark.skipif(
    isinstance(library, str) or "avx512" not in library.instructions,
    reason="NATIVE ENCODER NOT RUN: it needs AVX-512",
)


class ManyScales(NF4):
    """Candidate scales so far apart that codes change more than once."""

    boundaries = NF4().boundaries
    shares = tuple(0.3 * 1.05**i for i in range(40))


class FewScales(NF4):
    boundaries = NF4().boundaries
    shares = tuple(0.3 * 1.25**i for i in range(6))


FORMATS = [
    NF4(),
    ManyScales(fit="search"),
    FewScales(block_size=32, fit="search"),
    NF4(block_size=32, fit="search"),
    NF4(fit="search", double_quantization=True),
    # Six vectors per block, summed like eight.
    NF4(block_size=96, fit="search"),
    NF4(block_size=256, double_quantization=True),
]


@needs_encoder
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_encoding_is_that_of_the_format_bit_by_bit(format, rng):
    w = rng.standard_normal((3, 37, 768)).astype(np.float32)
    w[0, :, :32] = 0
    w[0, 1, :96] = 0
    # Scales and thresholds near or below the smallest normal number.
    w[1, 0] *= 1e-30
    w[1, 1] *= 1e30
    w[1, 2] *= 1e-37
    w[1, 3] *= np.finfo(np.float32).max / np.abs(w[1, 3]).max()
    # Levels and boundaries, which are ties.
    w[2, 0, :31] = [*format.codebook, *format.boundaries]
    w[2, 0, 31:] = 0
    w = jnp.asarray(w)
    assert cpu.encodes(w, format)
    quantize = ft.partial(eqquant.quantize, format=format)
    codes, scales, _ = encode_rows(w, format, (-1,), 2**20)
    for native in (quantize(w), jax.jit(quantize)(w), jax.vmap(quantize)(w)):
        assert_identical(native.codes, codes)
        jax.tree.map(assert_identical, native.scales, scales)
    assert "eqquant_encode" in jax.jit(quantize).lower(w).as_text()
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="must be finite"):
            eqquant.quantize(w.at[1, 36, 767].set(bad), format)


@needs_encoder
def test_a_search_in_large_steps_is_by_xla(normal):
    class Own(NF4):
        boundaries = NF4().boundaries
        shares = (0.5, 1.0)

    assert cpu.encodes(normal(2, 64), NF4(fit="search"))
    assert not cpu.encodes(normal(2, 64), Own(fit="search"))


class FlipsEncoded:
    def encode(self, *args):
        codes, scales = super().encode(*args)
        return codes ^ 1, scales


class FlipsNearest(NF4):
    def nearest(self, blocks, scales):
        return super().nearest(blocks, scales) ^ 1


class Flipped(FlipsEncoded, NF4):
    pass


class Inherits(FlipsNearest):
    pass


@pytest.mark.parametrize("make", [FlipsNearest, Flipped, Inherits])
def test_a_subclass_of_nf4_is_encoded_in_its_own_way(make, normal):
    w = normal(3, 128)
    q = eqquant.quantize(w, make())
    assert_identical(q.codes, eqquant.quantize(w, NF4()).codes ^ 0x11)
    assert_identical(eqquant.straight_through(w, make()), q.dequantize())


def test_a_format_may_have_boundaries_of_its_own(normal):
    class Own(FlipsNearest):
        boundaries = NF4().boundaries

    assert Own().boundaries == NF4().boundaries
    assert FlipsNearest().boundaries is None
