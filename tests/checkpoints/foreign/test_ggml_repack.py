"""Native repacking of blocks of GGUF files."""

import eqquant.checkpoints.foreign._ggml_repack as repack
import jax
import numpy as np
import pytest
from eqquant.checkpoints.foreign import NotExact, TYPES
from eqquant.kernels import cpu


needs_native = pytest.mark.skipif(
    isinstance(cpu.load(), str), reason=f"NATIVE KERNELS NOT RUN: {cpu.load()}"
)
# All types that eqquant stores exactly, except types whose codes or scales can be
# invalid (ternary, MXFP4).
NATIVE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"]
NATIVE += ["Q6_K", "IQ4_NL", "IQ4_XS"]


def random_blocks(kind, rng, count):
    raw = rng.integers(0, 256, (count, kind.nbytes), np.uint8)
    if kind.name == "Q8_0":
        raw[raw == 128] = 0  # -128 is not a level of INT8.
    return raw


@needs_native
def test_types_with_native_repacking():
    stored = [kind for kind in TYPES.values() if kind.format is not None]
    assert [k.name for k in stored if repack._native(k.name)] == NATIVE


@needs_native
@pytest.mark.parametrize("name", NATIVE)
def test_native_repacking_equals_numpy(name, rng):
    """The function in NumPy defines the result, bit for bit."""
    (kind,) = (kind for kind in TYPES.values() if kind.name == name)
    for count in (1, 31, 100):  # The kernel processes 32 blocks at a time.
        raw = random_blocks(kind, rng, count)
        before = raw.copy()
        got, expected = repack.repacked(kind, raw), repack._repacked(kind, raw)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        for part, other in leaves:
            assert part.dtype == other.dtype and part.shape == other.shape
            assert part.tobytes() == other.tobytes()
        out = jax.tree.map(lambda part: np.zeros(part.size, part.dtype), expected)
        again = repack.repacked(kind, raw, out)
        for part, other in zip(*map(jax.tree.leaves, (again, out)), strict=True):
            assert np.may_share_memory(part, other)
        same = lambda part, other: part.tobytes() == other.tobytes()
        assert jax.tree.all(jax.tree.map(same, out, expected))
        np.testing.assert_array_equal(raw, before)


def test_levels_that_int8_lacks():
    (kind,) = (kind for kind in TYPES.values() if kind.name == "Q8_0")
    raw = np.zeros((3, kind.nbytes), np.uint8)
    raw[1, 20] = 128
    with pytest.raises(NotExact, match="integers from -128 to 0"):
        repack.repacked(kind, raw)


@needs_native
def test_functions_that_do_more_than_move_bits(rng):
    raw = rng.integers(0, 256, (7, 12), np.uint8)
    reverse = lambda raw: [raw[:, ::-1] ^ np.uint8(3), raw[:, 4:9] >> np.uint8(2)]
    layouts = cpu.find_layouts(reverse, 12)
    assert layouts is not None
    for layout, expected in zip(layouts, reverse(raw), strict=True):
        np.testing.assert_array_equal(cpu.relayout(layout, raw), expected)
    assert cpu.find_layouts(lambda raw: [raw + np.uint8(1)], 12) is None
    assert cpu.find_layouts(lambda raw: [raw[:, :1] & raw[:, 1:2]], 12) is None
