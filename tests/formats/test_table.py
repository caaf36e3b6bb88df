"""The number of boundaries below a value, by selects and by the GPU lookup."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.formats import _table
from jax import lax


_fp4 = [0.25, np.nextafter(np.float32(0.75), 0), 1.25, 1.75, 2.5, 3.5, 5.0]
BOUNDARIES = {
    "nf4": eqquant.NF4().boundaries,
    "nf3": _table.midpoints(eqquant.NF3().table, np.dtype("float32")),
    "nf2": _table.midpoints(eqquant.NF2().table, np.dtype("float32")),
    "fp4": _fp4,
    "two levels": [0.1],
    "large": [-3e30, 1e29, 2e30],
    "15, evenly": list(np.linspace(-1, 1, 15, dtype=np.float32)),
}


def numbers(ends: np.ndarray) -> np.ndarray:
    """Return boundaries, neighbouring floats, special values, and values between."""
    rng = np.random.default_rng(0)
    inf, top = np.float32(np.inf), np.finfo("float32").max
    special = [0.0, -0.0, inf, -inf, top, -top, 2e-38, -2e-38]
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001], np.uint32)
    spread = 2 * np.abs(ends).max()
    out = np.concatenate(
        [
            ends,
            np.nextafter(ends, inf),
            np.nextafter(ends, -inf),
            np.array(special, np.float32),
            nans.view(np.float32),
            rng.uniform(-spread, spread, 20_000).astype(np.float32),
            rng.standard_normal(1000).astype(np.float32) ** 9,
        ]
    )
    # CPUs compare subnormal numbers as zero.
    return out[~((out != 0) & (np.abs(out) < np.finfo("float32").tiny))]


@pytest.mark.parametrize("name", BOUNDARIES)
def test_looked_up_codes_are_those_of_the_search(name):
    ends = np.array(BOUNDARIES[name], np.float32)
    cells = _table._cells(tuple(map(float, ends)))
    assert cells is not None
    x = jnp.asarray(numbers(ends))
    expected = (np.asarray(x)[:, None] > ends).sum(1)
    for found in (_table._look_up(x, cells), _table.count_below(x, list(ends))):
        assert found.dtype == jnp.uint8
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_boundaries_that_are_close_are_searched():
    assert _table._cells((-1.0, -0.999, 1.0)) is None
    x = jnp.array([-1.0, -0.9995, 0.0, 2.0, jnp.nan], jnp.float32)
    found = _table.count_below(x, [-1.0, -0.999, 1.0])
    np.testing.assert_array_equal(np.asarray(found), [0, 1, 2, 3, 0])


def test_float64_is_searched():
    with jax.enable_x64(True):
        x = jnp.array([0.1, np.nextafter(0.1, 1)], jnp.float64)
        jaxpr = str(jax.make_jaxpr(lambda x: _table.count_below(x, [0.1]))(x))
        assert "gather" not in jaxpr
        assert list(_table.count_below(x, [0.1])) == [0, 1]


def test_only_cuda_looks_up():
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    encode = lambda x: lax.reshape(eqquant.NF4().nearest(x, x[:, 0]), (512,))
    for platform, looks_up in {"cpu": False, "tpu": False, "cuda": True}.items():
        lowered = jax.jit(encode).trace(x).lower(lowering_platforms=(platform,))
        assert ("gather" in lowered.as_text()) == looks_up
