"""Native kernels with FP8 and three-bit codes."""

import eqquant
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import FP8, Int2, Int3, NF3
from eqquant.kernels import cpu, Matmul
from eqquant.kernels.cpu._call import call
from helpers import relative


library = cpu.load()
pytestmark = pytest.mark.skipif(
    isinstance(library, str), reason=f"NATIVE KERNELS NOT RUN: {library}"
)
FLOATS = [
    name
    for needs, name in (
        ("avx2", "float, AVX2"),
        ("avx512", "float, AVX-512"),
        ("neon", "float, NEON"),
    )
    if not isinstance(library, str) and needs in library.instructions
]


def multiply(x, q, *, kernel, contract_rows=False):
    args = x, q.codes, q.scales
    return call(kernel, Matmul(q.format, contract_rows).of(*args), *args)


@pytest.mark.parametrize("kernel", FLOATS)
@pytest.mark.parametrize("kind", ["e4m3fn", "e5m2"])
def test_every_float_of_8_bits_is_exact(kernel, kind):
    # Including subnormal values.
    format = FP8(kind=kind)
    used = [code for code in range(256) if code not in format.unused_codes]
    q = eqquant.quantize(jnp.ones((1, len(used))), format)
    codes, scales = jnp.asarray([used], jnp.uint8), jnp.ones((1, 1))
    q = q.replace(codes=codes, scales=scales)
    got = multiply(jnp.eye(len(used), dtype=jnp.float32), q, kernel=kernel)
    levels = np.asarray(used, np.uint8).view(getattr(jnp, f"float8_{kind}"))
    np.testing.assert_array_equal(got[:, 0], levels.astype(np.float32))


@pytest.mark.parametrize("kernel", FLOATS)
@pytest.mark.parametrize("block_size", [16, 96, 128])
def test_groups_of_three_bits_of_any_size(kernel, block_size, normal):
    # Other tests use groups of 64 codes.
    q = eqquant.quantize(normal(19, 384), NF3(block_size=block_size))
    w = np.asarray(q.dequantize(), np.float64)
    for x, contract_rows in ((normal(2, 384), False), (normal(2, 19), True)):
        got = multiply(x, q, kernel=kernel, contract_rows=contract_rows)
        expected = np.asarray(x, np.float64) @ (w if contract_rows else w.T)
        assert relative(got, expected) < 3e-6


def test_explain_names_their_kernels(normal):
    def explain(format):
        q = eqquant.quantize(normal(8, 128), format)
        return eqquant.debug.explain(
            lambda x, q: x @ q.T, normal(1, 128), q, platform="cpu"
        )

    assert "native kernel 'float, " in explain(FP8())
    assert "native kernel" in explain(Int3())
    assert "native kernel" in explain(Int3(affine=True, block_size=None))
    assert "native kernel" in explain(Int2(block_size=16))
    assert "shorter than a register" in explain(Int3(block_size=8))
