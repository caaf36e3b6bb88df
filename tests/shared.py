"""Setup of test workers, which conftest.py loads: eight CPU devices and shared
fixtures."""

import collections
import gc
import os
import zlib

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
    # XLA's older fusion emitters take half of the time to compile. `make
    # test-lowerings` uses the default emitters. Later versions of XLA and the TPU
    # compiler reject this flag, so it is removed after the CPU compiler has read it.
    older = jax.__version_info__ < (0, 11) and "EQQUANT_CPU" not in os.environ
    if older:
        flags = os.environ["XLA_FLAGS"]
        os.environ["XLA_FLAGS"] = flags + " --xla_cpu_use_fusion_emitters=false"
        jax.devices()
        os.environ["XLA_FLAGS"] = flags
    if jax.default_backend() == "gpu":
        # XLA rounds the operands of float32 references to TF32 otherwise.
        jax.config.update("jax_default_matmul_precision", "float32")
    programs.share_contexts()
    if os.environ.get("EQQUANT_TEST_CACHE") != "off":
        programs.keep_on_disk(older)


# Disabling optimisations saves a third of the time. The listed tests need them, because
# they compare bits, measure memory, or inspect compiled programs. `make test-lowerings`
# enables them everywhere.
OPTIMISED = {
    "test_quantize_in_jax.py",
    "test_tpu_compiled.py",
    "test_gpu_compiled.py",
    "test_examples.py",
    "test_llama_steps.py",
}


@pytest.hookimpl(tryfirst=True)  # Before `-m 'not slow'` selects.
def pytest_collection_modifyitems(config, items):
    cases = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            cases[item.path.name, item.originalname].append(item)
    for (file, name), found in cases.items():
        # One in four cases stays fast, at least one. `make test-slow` runs the others.
        # Start anywhere, so that each format is fast in a quarter of the tests.
        first = zlib.crc32(f"{file} {name}".encode()) % min(4, len(found))
        for i, item in enumerate(found):
            if i % 4 != first and "EQQUANT_ALL_CASES" not in os.environ:
                item.add_marker("slow")
    if part := os.environ.get("EQQUANT_SLOW_PART"):
        kept, left_out = [], []
        for item in items:
            (kept if is_in_part(item, part) else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    # These run last, because each switch clears the compiled programs.
    items.sort(key=lambda item: item.path.name in OPTIMISED)


def is_in_part(item, part):
    """Return whether a test is fast, or in a part of the slow tests: "1/3" to "3/3"."""
    number, count = map(int, part.split("/"))
    own = zlib.crc32(item.nodeid.encode()) % count
    return not item.get_closest_marker("slow") or own == number % count


@pytest.fixture(scope="module", autouse=True)
def _hardly_optimised(request):
    name = "jax_disable_most_optimizations"
    hardly = request.path.name not in OPTIMISED and "EQQUANT_CPU" not in os.environ
    if hardly != jax.config.read(name):
        # Otherwise programs that are already compiled would be reused.
        jax.clear_caches()
        jax.config.update(name, hardly)


def pytest_collection_finish():
    # Imported objects live forever: exclude them from garbage collection, and collect
    # less often than every 700 objects, because tracing creates millions.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    return (yield from _skip_without_devices())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    return (yield from _skip_without_devices())


def _skip_without_devices():
    """Skip tests of meshes where there are not eight devices, as on a GPU."""
    try:
        return (yield)
    except ValueError as error:
        if len(jax.devices()) < 8 and "Number of devices" in str(error):
            pytest.skip(str(error))
        raise


def pytest_runtest_teardown():
    programs.forget_if_many()


hypothesis.settings.register_profile(
    "eqquant", deadline=None, derandomize=True, max_examples=30, database=None
)
hypothesis.settings.load_profile("eqquant")


def some_slow(formats, slow) -> list:
    marks = lambda f: [pytest.mark.slow] if f in slow else []
    return [pytest.param(f, marks=marks(f)) for f in formats]


# Formats that share a code path are slow: ternary with binary, INT4 with NF4 or
# ternary, and most blocked formats.
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
    """Disable run-time type checks, like a user can."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def normal(rng):
    """Return a function that makes normally distributed arrays of any shape."""

    def make(*shape: int, dtype=jnp.float32) -> jax.Array:
        # Without a dtype, JAX 0.10 compiles a program for each shape.
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return make
