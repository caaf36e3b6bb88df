"""Compiling the library of native kernels.

    python eqquant/kernels/cpu/_build.py

The build of the package runs it, so it needs nothing but Python, a C++ compiler, and
for XLA's header files JAX.
"""

import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile


here = pathlib.Path(__file__).resolve().parent
library = here / "_native.so"
_sources = here / "src"
# Plain x86-64: what needs more is marked so in the sources, and chosen at run time. The
# warning is wrong about the intrinsics of some versions of GCC.
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


def fingerprint() -> str:
    """Of the sources. The library carries that of its own, so that an old one is not
    taken for theirs."""
    digest = hashlib.sha256()
    for path in sorted(_sources.glob("*.*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compiler() -> str:
    """A C++ compiler, `CXX` if that is set."""
    if platform.machine().lower() not in ("x86_64", "amd64") or os.name != "posix":
        machine = f"{platform.system()} on {platform.machine()}"
        raise CannotBuild(f"native kernels are for x86-64, not for {machine}")
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


def build(out: pathlib.Path = library) -> pathlib.Path:
    """Compile the library; `CannotBuild` if that cannot be done here."""
    command = [compiler(), *_flags, f'-DEQQUANT_SOURCES="{fingerprint()}"']
    command += ["-isystem", include_dir()]
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(_sources.glob("*.cpp"))
        objects = [str(pathlib.Path(scratch) / f"{path.stem}.o") for path in sources]
        running = [
            subprocess.Popen(
                [*command, "-c", str(path), "-o", target],
                stderr=subprocess.PIPE,
                text=True,
            )
            for path, target in zip(sources, objects, strict=True)
        ]
        messages = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            raise CannotBuild("the compiler failed:\n" + "".join(messages))
        # Beside its place first: a process that has the old one open keeps it.
        fresh = out.with_name(f"{out.name}.new")
        linked = subprocess.run(
            [command[0], "-shared", *_link_flags, *objects, "-o", str(fresh)],
            stderr=subprocess.PIPE,
            text=True,
        )
        if linked.returncode:
            raise CannotBuild(f"the linker failed:\n{linked.stderr}")
        fresh.replace(out)
    return out


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as problem:
        sys.exit(str(problem))
