"""The cache of compiled programs, between tests and between runs."""

import ctypes
import gc
import hashlib
import importlib.metadata
import os
import pathlib
import platform

import jax
from eqquant.kernels.cpu import _library


def cache_key(*options) -> str:
    """Return the inputs of compiled programs that JAX's own cache keys lack.

    JAX's keys contain the HLO and the options. A change of eqquant changes the HLO,
    except in native kernels, which a program calls by name.
    """
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


def keep_on_disk(*options) -> None:
    cache = pathlib.Path(__file__).parents[1] / ".cache" / "jax" / cache_key(*options)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# JAX makes an MLIR context with all dialects for every program. It takes 2.5 ms, which
# is half of the lowering time of a small program, and 1.2 MB, which adds up to most of
# the memory of a worker. Test programs share one context until the cache is cleared.
_contexts = []


def share_contexts() -> None:
    """Share one MLIR context among programs, if this version of JAX allows it.

    Tried on JAX 0.10.2 and 0.12.0.1.
    """
    from jax._src.interpreters import mlir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return

    def shared():
        try:
            mlir.ir.InsertionPoint.current  # noqa: B018
        except ValueError:
            pass
        else:  # A program that is compiled while another one is lowered.
            return make()
        if not _contexts:
            _contexts.append(make())
        return _contexts[0]

    mlir.make_ir_context = shared


def resident() -> int:
    """Return the resident memory of this process in bytes, or 0 if unknown."""
    statm = pathlib.Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_LIMIT = 1.6e9
_limit = _LIMIT


def forget_if_many() -> None:
    """Clear compiled programs if the process takes more than 1.6 GB."""
    global _limit
    if resident() > _limit:
        jax.clear_caches()
        _contexts.clear()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc only.
            trim(0)
        _limit = max(_LIMIT, resident() + 0.2e9)
