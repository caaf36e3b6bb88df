"""Each of the other libraries is installed into its own environment, which is kept."""

import os
import pathlib
import shlex
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence


CACHE = (
    pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    / "eqquant-peers"
)


def install(
    name: str, packages: Sequence[str], cache: pathlib.Path, header: str = ""
) -> str:
    """The Python of an environment; a `RuntimeError` says why there is none. A header
    is put before every C++ file that is compiled for it."""
    folder = cache / name
    python = folder / "bin" / "python"
    done = folder / ".installed"
    wanted = "\n".join([*packages, *header.splitlines()])
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
        # Nothing remains that was compiled with another header.
        venv.create(folder, with_pip=True, clear=bool(header))
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        environment = dict(os.environ)
        if header:
            file = folder.resolve() / "header.h"
            file.write_text(header)
            flags = environment.get("CXXFLAGS", "")
            environment["CXXFLAGS"] = f"{flags} -include {shlex.quote(str(file))}"
            # pip may have kept what was compiled without it.
            command.append("--no-cache-dir")
        ran = subprocess.run(
            [*command, *packages], env=environment, capture_output=True, text=True
        )
        if ran.returncode:
            raise RuntimeError(f"cannot be installed: {last_line(ran.stderr)}")
        done.write_text(wanted)
    return str(python)


def run(
    python: str, *arguments: str, environment: Mapping[str, str], **options
) -> subprocess.CompletedProcess:
    """A script in a process of its own, on the CPU."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([python, *arguments], env=environment, text=True, **options)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
