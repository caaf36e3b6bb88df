"""Compiling the library of native kernels.

    python eqquant/kernels/cpu/_build.py
    python eqquant/kernels/cpu/_build.py aarch64-linux-gnu-g++ aarch64 build/arm.so

A library that is up to date is kept. The build of the package runs this, so it needs
nothing but Python, a C++ compiler, and for XLA's header files JAX.
"""

import concurrent.futures
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable


here = pathlib.Path(__file__).resolve().parent
library = here / "_native.so"
_sources = here / "src"
# Plain x86-64, or plain ARM: what needs more is marked so in the sources, and chosen at
# run time. The warning is wrong about the intrinsics of some versions of GCC.
_flags = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # Where products are to be added in one step, it is said.
    "-Wno-maybe-uninitialized",
]
# Then it runs beside any C++ library, older ones included.
_link_flags = (
    ["-static-libstdc++", "-static-libgcc", "-s"] if sys.platform == "linux" else []
)


class CannotBuild(Exception):
    """Why there will be no library."""


def architecture(machine: str = "") -> str | None:
    """Which folder of the sources is for a machine, this one if none is named; `None`
    if none is."""
    names = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}
    return names.get((machine or platform.machine()).lower())


def fingerprint() -> str:
    """Of the sources and of how they are compiled. The library carries that of its own,
    so that an old one is not taken for theirs."""
    digest = hashlib.sha256()
    for path in sorted(_sources.rglob("*.*")):
        name = path.relative_to(_sources).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_flags, _link_flags)).encode())
    return digest.hexdigest()[:16]


def recipe(compiler: str, headers: str) -> str:
    """A fingerprint of all that decides what is in the library: that of the sources,
    the compiler, and XLA's header files. The library carries it, too."""
    digest = hashlib.sha256(fingerprint().encode())
    about = subprocess.run([compiler, "-v"], capture_output=True)
    digest.update(compiler.encode() + about.stdout + about.stderr)
    for path in sorted(pathlib.Path(headers).rglob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def is_current(recipe: str, out: pathlib.Path = library) -> bool:
    """Whether there is a library, made from just that."""
    return out.exists() and recipe.encode() in out.read_bytes()


def compiler() -> str:
    """A C++ compiler, `CXX` if that is set."""
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
    """The library, compiled if there is none that is up to date; `CannotBuild` if that
    cannot be done here. `cross` is a compiler for another machine, and which folder of
    the sources that takes."""
    cxx, machine = cross or (compiler(), architecture())
    headers = include_dir()
    made_from, made_by = fingerprint(), recipe(cxx, headers)
    if is_current(made_by, out):
        return out
    command = [cxx, *_flags, "-I", str(_sources), "-isystem", headers]
    command += [f'-DEQQUANT_SOURCES="{made_from}"', f'-DEQQUANT_RECIPE="{made_by}"']
    sources = [*_sources.glob("*.cpp"), *_sources.glob(f"{machine}/*.cpp")]
    sources.sort(key=_how_soon)
    at_once = min(_cores(), len(sources))
    say(
        f"Compiling the native CPU kernels: {len(sources)} files, {at_once} at a time. "
        "On two cores that takes about 30 seconds."
    )
    with (
        tempfile.TemporaryDirectory() as scratch,
        concurrent.futures.ThreadPoolExecutor(at_once) as pool,
    ):
        objects = [str(pathlib.Path(scratch) / f"{path.stem}.o") for path in sources]
        commands = [
            [*command, "-c", str(path), "-o", target]
            for path, target in zip(sources, objects, strict=True)
        ]
        compiled = list(pool.map(_run, commands))
        if any(process.returncode for process in compiled):
            messages = "".join(process.stderr for process in compiled)
            raise CannotBuild(f"the compiler failed:\n{messages}")
        if recipe(cxx, headers) != made_by:
            raise CannotBuild("its sources changed while they were compiled")
        # Beside its place first: a process that has the old one open keeps it.
        fresh = out.with_name(f"{out.name}.new")
        linked = _run([cxx, "-shared", *_link_flags, *objects, "-o", str(fresh)])
        if linked.returncode:
            raise CannotBuild(f"the linker failed:\n{linked.stderr}")
        fresh.replace(out)
    return out


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _how_soon(path: pathlib.Path) -> tuple[bool, str]:
    """Those that take longest first, so that no core is left alone with one of them."""
    return not path.stem.startswith(("float", "handlers", "digits")), path.stem


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
