"""Compile the library of native kernels.

    python eqquant/kernels/cpu/_build.py
    python eqquant/kernels/cpu/_build.py aarch64-linux-gnu-g++ aarch64 build/arm.so

A current library is kept. The build of the package runs this file, so it requires only
Python, a C++ compiler, and JAX for the header files of XLA.
"""

import concurrent.futures
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable


here = pathlib.Path(__file__).resolve().parent
library = here / "_native.so"
_sources = here / "src"
# Folders of sources for one architecture, at the second level of `src`.
_folders = {
    "x86": ("x86", "avx2", "avx512", "vnni", "amx"),
    "arm": ("arm", "neon", "dotprod", "i8mm"),
}
# The target is plain x86-64, or plain ARM. The sources mark functions that need more
# instructions, and choose them at run time. The disabled warning is a false positive in
# the intrinsics of some versions of GCC.
_flags = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # The sources write fused multiply-adds explicitly.
    "-Wno-maybe-uninitialized",
]
# A static C++ runtime, because the version on the machine may be older.
_link_flags = (
    ["-static-libstdc++", "-static-libgcc", "-s"] if sys.platform == "linux" else []
)


class CannotBuild(Exception):
    """The reason why the library cannot be compiled."""


def architecture(machine: str = "") -> str | None:
    """Return the architecture of a machine, by default this one: a key of `_folders`.
    Return None if it has no kernels."""
    names = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}
    return names.get((machine or platform.machine()).lower())


def fingerprint() -> str:
    """Return a hash of the sources and the flags. The library contains it, so that an
    outdated library is detected."""
    digest = hashlib.sha256()
    for path in sorted(_sources.rglob("*.*")):
        name = path.relative_to(_sources).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_flags, _link_flags)).encode())
    return digest.hexdigest()[:16]


def recipe(compiler: str, headers: str) -> str:
    """Return a hash of everything that determines the library: the fingerprint, the
    compiler, flags of the linker, and the header files of XLA. The library contains
    it."""
    linking = os.environ.get("EQQUANT_LDFLAGS", "")
    digest = hashlib.sha256((fingerprint() + linking).encode())
    about = subprocess.run([compiler, "-v"], capture_output=True)
    digest.update(compiler.encode() + about.stdout + about.stderr)
    for path in sorted(pathlib.Path(headers).rglob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def is_current(recipe: str, out: pathlib.Path = library) -> bool:
    """Return whether the library exists and contains this recipe."""
    return out.exists() and recipe.encode() in out.read_bytes()


def compiler() -> str:
    """Return the path of a C++ compiler: `CXX` if it is set and exists."""
    if architecture() is None or os.name != "posix":
        machine = f"{platform.system()} on {platform.machine()}"
        raise CannotBuild(
            f"native kernels are for x86-64 and ARM of 64 bits, not for {machine}"
        )
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CannotBuild("no C++ compiler was found (c++, g++, clang++)")


def include_dir() -> str:
    try:
        import jax
    except ImportError as error:
        raise CannotBuild(f"XLA's header files were not found: {error}") from error
    return jax.ffi.include_dir()


def build(
    out: pathlib.Path = library,
    say: Callable[[str], None] = lambda message: None,
    cross: tuple[str, str] | None = None,
) -> pathlib.Path:
    """Compile the library unless it is current, and return its path.

    `cross` is a compiler for another machine, and the architecture of that machine.
    Raise `CannotBuild` if this machine cannot compile the library.
    """
    cxx, machine = cross or (compiler(), architecture())
    headers = include_dir()
    made_from, made_by = fingerprint(), recipe(cxx, headers)
    if is_current(made_by, out):
        return out
    command = [cxx, *_flags, "-I", str(_sources), "-isystem", headers]
    command += [f'-DEQQUANT_SOURCES="{made_from}"', f'-DEQQUANT_RECIPE="{made_by}"']
    sources = sources_of(machine)
    workers = min(_cores(), len(sources))
    say(
        f"Compiling the native CPU kernels: {len(sources)} files, {workers} at a time. "
        "This takes about a minute on two cores."
    )
    with (
        tempfile.TemporaryDirectory() as scratch,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        objects = [str(pathlib.Path(scratch) / f"{i}.o") for i in range(len(sources))]
        commands = [
            [*command, "-c", str(path), "-o", target]
            for path, target in zip(sources, objects, strict=True)
        ]
        compiled = list(pool.map(_run, commands))
        if any(process.returncode for process in compiled):
            messages = "".join(process.stderr for process in compiled)
            raise CannotBuild(f"the compiler failed:\n{messages}")
        if recipe(cxx, headers) != made_by:
            raise CannotBuild("the sources changed while they were compiled")
        # Rename a new file: other processes may have the old library open.
        fresh = out.with_name(f"{out.name}.new")
        flags = shlex.split(os.environ.get("EQQUANT_LDFLAGS", "")) or _link_flags
        linked = _run([cxx, "-shared", *objects, *flags, "-o", str(fresh)])
        if linked.returncode:
            raise CannotBuild(f"the linker failed:\n{linked.stderr}")
        fresh.replace(out)
    return out


def sources_of(machine: str | None) -> list[pathlib.Path]:
    """Return the source files for an architecture."""
    sources = list(_sources.glob("*/*.cpp"))
    for folder in _folders[str(machine)]:
        sources += _sources.glob(f"*/{folder}/*.cpp")
    # Start the slowest files first, so that none of them remains for a single core.
    slowest = ("float", "int", "array")
    return sorted(sources, key=lambda path: (not path.stem.startswith(slowest), path))


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":
    try:
        if len(sys.argv) > 1:  # For another machine.
            name, machine, place = sys.argv[1:]
            cross = name, str(architecture(machine))
            print(build(pathlib.Path(place).resolve(), print, cross))
        else:
            print(build(say=print))
    except CannotBuild as problem:
        sys.exit(str(problem))
