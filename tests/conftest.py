"""Eight devices made of the CPU, every annotation of eqquant checked, and programs that
are compiled once and kept between runs."""

import ctypes
import gc
import hashlib
import importlib.metadata
import os
import pathlib
import platform


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
import jaxtyping
import numpy as np
import pytest
from eqquant.kernels.cpu import _library
from helpers import DEFAULT_FORMATS, FORMATS, SAME_PATH


def cache_key(*options) -> str:
    """What compiled programs depend on beside their HLO and options, which JAX's own
    keys have: a change of eqquant either changes these, and is compiled anew, or it is
    in a native kernel, which a program calls by name."""
    parts = [platform.machine(), os.environ.get("EQQUANT_CPU", ""), repr(options)]
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        parts += sorted({x for x in lines if x.startswith(("flags", "Features"))})
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            parts.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            parts.append("")
    key = hashlib.sha256("\n".join(parts).encode())
    if _library.library.exists():
        key.update(_library.library.read_bytes())
    return key.hexdigest()[:16]


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
    if os.environ.get("EQQUANT_TEST_CACHE") != "off":
        cache = pathlib.Path(__file__).parents[1] / ".cache" / "jax" / cache_key(older)
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Few optimisations save a third of the time. Tests have all of them only where these
# matter: that every way to quantize gives the same bits, what a model takes, which
# programs are made for TPUs; and `make test-lowerings` has them everywhere.
OPTIMISED = {
    "test_quantize_in_jax.py",
    "test_tpu_compiled.py",
    "test_examples.py",
    "test_training_examples.py",
    "test_llama_programs.py",
}


@pytest.fixture(scope="module", autouse=True)
def _hardly_optimised(request):
    name = "jax_disable_most_optimizations"
    hardly = request.path.name not in OPTIMISED and "EQQUANT_CPU" not in os.environ
    if hardly != jax.config.read(name):
        # What is compiled already would be taken as it is.
        jax.clear_caches()
        jax.config.update(name, hardly)


def resident() -> int:
    """Bytes of memory that this process has, where the system tells."""
    statm = pathlib.Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


LIMIT = 1.2e9
limit = LIMIT


def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs where they take more than a gigabyte."""
    global limit
    if resident() > limit:
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # Of glibc.
            trim(0)
        limit = max(LIMIT, resident() + 0.2e9)


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
BLOCKED += [f for f in FORMATS if isinstance(f, (*SAME_PATH, eqquant.Codebook))]


@pytest.fixture(
    params=some_slow(FORMATS, [eqquant.Ternary(), *BLOCKED]),
    ids=repr,
)
def format(request) -> eqquant.Format:
    return request.param


@pytest.fixture(
    params=some_slow(DEFAULT_FORMATS, [eqquant.Ternary(), *BLOCKED]),
    ids=lambda f: f.name,
)
def default_format(request) -> eqquant.Format:
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
