"""Eight devices made of the CPU, every annotation of eqquant checked, and what tests
share: conftest.py loads this."""

import gc
import os

from jaxtyping import install_import_hook


with install_import_hook("eqquant", "beartype.beartype"):
    import eqquant

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import programs
import pytest
from helpers import DEFAULT_FORMATS, FORMATS, SAME_PATH


def pytest_configure(config):
    # XLA's older way to compile a fusion takes half of the time. What `make
    # test-lowerings` runs is compiled as users have it. Compilers of later versions do
    # not know the option, and neither does that for TPUs: it is gone once the CPU's has
    # read it.
    older = jax.__version_info__ < (0, 11) and "EQQUANT_CPU" not in os.environ
    if older:
        flags = os.environ["XLA_FLAGS"]
        os.environ["XLA_FLAGS"] = flags + " --xla_cpu_use_fusion_emitters=false"
        jax.devices()
        os.environ["XLA_FLAGS"] = flags
    programs.share_contexts()
    if os.environ.get("EQQUANT_TEST_CACHE") != "off":
        programs.keep_on_disk(older)


# Few optimisations save a third of the time. Tests have all of them only where these
# matter: that every way to quantize gives the same bits, what a model takes, which
# programs are made for TPUs and GPUs; and `make test-lowerings` has them everywhere.
OPTIMISED = {
    "test_quantize_in_jax.py",
    "test_tpu_compiled.py",
    "test_gpu_compiled.py",
    "test_examples.py",
    "test_training_examples.py",
    "test_llama_programs.py",
}


def pytest_collection_modifyitems(items):
    # Last, as every change from the one to the other forgets what is compiled.
    items.sort(key=lambda item: item.path.name in OPTIMISED)


@pytest.fixture(scope="module", autouse=True)
def _hardly_optimised(request):
    name = "jax_disable_most_optimizations"
    hardly = request.path.name not in OPTIMISED and "EQQUANT_CPU" not in os.environ
    if hardly != jax.config.read(name):
        # What is compiled already would be taken as it is.
        jax.clear_caches()
        jax.config.update(name, hardly)


def pytest_collection_finish():
    # What is imported stays: the garbage collector need not look at it again, nor after
    # every 700 objects, of which tracing makes millions.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_teardown():
    programs.forget_if_many()


hypothesis.settings.register_profile(
    "eqquant", deadline=None, derandomize=True, max_examples=30, database=None
)
hypothesis.settings.load_profile("eqquant")


def some_slow(formats, slow) -> list:
    marks = lambda f: [pytest.mark.slow] if f in slow else []
    return [pytest.param(f, marks=marks(f)) for f in formats]


# Slow are those that take the path of another: ternary that of binary, INT4 that of NF4
# or of ternary, and most blocked ones.
BLOCKED = [f for f in FORMATS if f.block_size == 32 and f.name != "binary"]
BLOCKED += [f for f in FORMATS if isinstance(f, (*SAME_PATH, eqquant.formats.Codebook))]


@pytest.fixture(
    params=some_slow(FORMATS, [eqquant.Ternary(), *BLOCKED]),
    ids=repr,
)
def format(request) -> eqquant.formats.Format:
    return request.param


@pytest.fixture(
    params=some_slow(DEFAULT_FORMATS, [eqquant.Ternary(), *BLOCKED]),
    ids=lambda f: f.name,
)
def default_format(request) -> eqquant.formats.Format:
    return request.param


@pytest.fixture
def untyped(monkeypatch):
    """No run-time checks of types, which users may turn off."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def normal(rng):
    """Normal arrays of any shape."""

    def make(*shape: int, dtype=jnp.float32) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))

    return make
