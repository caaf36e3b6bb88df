"""A folder of compiled programs, so that a second start does not compile them again."""

import contextlib
import ctypes
import gc
import hashlib
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator
from typing import TypeVar

import eqquant
import jax
import jaxlib.version


Program = TypeVar("Program")


# The most bytes of all folders of programs. The programs of a model take a few MB.
LIMIT = 2**29


def keep_programs(limit: int = LIMIT) -> None:
    """Keep compiled programs in a folder, and use the programs that are there.

    The folder is in the user's cache folder. `JAX_COMPILATION_CACHE_DIR` selects
    another folder. It can be deleted at any time. If all programs take more than
    `limit` bytes, the programs that were not used for the longest time are deleted.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    programs = pathlib.Path(caches, "eqquant", "programs")
    _prune(programs, limit)
    folder = programs / _fingerprint()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _prune(folder: pathlib.Path, limit: int) -> None:
    """Delete old files below a folder. Another process may do the same."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            about = path.stat()
            if path.is_file():
                used = max(about.st_atime, about.st_mtime)
                files.append((used, about.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > limit:
            with contextlib.suppress(OSError):
                path.unlink()


def _fingerprint() -> str:
    """Return a name for the versions and the CPU. The key that JAX computes for a
    program includes neither the native kernels nor the instruction sets of the CPU."""
    library = pathlib.Path(eqquant.__file__).parent / "kernels" / "cpu"
    built = [(f.name, f.stat().st_mtime_ns) for f in sorted(library.glob("_native*"))]
    versions = jax.__version__, jaxlib.version.__version__, eqquant.__version__
    about = repr((versions, built, platform.machine(), _instructions()))
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def _instructions() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return found[2] if found else platform.processor()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Do not search for unused objects. Loading and tracing make many objects that
    stay in use, and a second start takes 13% less time without searches."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def short_turns(seconds: float = 0.001) -> Iterator[None]:
    """Let Python threads take turns of a millisecond instead of five. A thread that
    loads weights waits for its turn after each part of a file, while another thread
    traces programs."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def release_freed(program: Program) -> Program:
    """Return `program`, after returning free memory to the system. The compiler
    allocates and frees 50 MB for a program. The allocator of glibc keeps them."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    return program
