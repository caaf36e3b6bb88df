"""Eight devices made of the CPU, and every annotation of eqquant checked."""

import os


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from jaxtyping import install_import_hook


with install_import_hook("eqquant", "beartype.beartype"):
    import eqquant

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.formats._registry import formats


hypothesis.settings.register_profile(
    "eqquant", deadline=None, derandomize=True, max_examples=30, database=None
)
hypothesis.settings.load_profile("eqquant")


def slow(format) -> object:
    return pytest.param(format, marks=pytest.mark.slow)


# A new format is picked up here. Blocked and per channel are different paths; slow are
# those that take the path of another: ternary that of binary, and most blocked ones.
DEFAULT = [make() for make in formats.values() if make is not eqquant.Ternary]
DEFAULT += [slow(eqquant.Ternary())]
FORMATS = [*DEFAULT, eqquant.Binary(block_size=32)]
FORMATS += [eqquant.NF4(double_quantization=True)]
FORMATS += [
    slow(make(block_size=32)) for make in formats.values() if make is not eqquant.Binary
]


@pytest.fixture(params=FORMATS, ids=repr)
def format(request) -> eqquant.Format:
    return request.param


@pytest.fixture(params=DEFAULT, ids=lambda f: f.name)
def default_format(request) -> eqquant.Format:
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def normal(rng):
    """Normal arrays of any shape."""

    def make(*shape: int, dtype=jnp.float32) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return make
