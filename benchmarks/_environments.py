"""Install other libraries into separate virtual environments, and run scripts there.

Environments are kept and reused.
"""

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
    """Return the path of the Python of an environment with `packages` installed.

    `header` is included at the start of every C++ file that pip compiles. Raise a
    `RuntimeError` if the packages cannot be installed.
    """
    folder = cache / name
    python = folder / "bin" / "python"
    done = folder / ".installed"
    contents = "\n".join([*packages, *header.splitlines()])
    if not done.exists() or done.read_text() != contents:
        print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
        # Clear packages that were compiled with another header.
        venv.create(folder, with_pip=True, clear=bool(header))
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        environment = dict(os.environ)
        if header:
            file = folder.resolve() / "header.h"
            file.write_text(header)
            flags = environment.get("CXXFLAGS", "")
            environment["CXXFLAGS"] = f"{flags} -include {shlex.quote(str(file))}"
            # pip's cache can hold wheels that were compiled without the header.
            command.append("--no-cache-dir")
        ran = subprocess.run(
            [*command, *packages], env=environment, capture_output=True, text=True
        )
        if ran.returncode:
            raise RuntimeError(f"cannot be installed: {last_line(ran.stderr)}")
        done.write_text(contents)
    return str(python)


def run(
    python: str, *arguments: str, environment: Mapping[str, str], **options
) -> subprocess.CompletedProcess:
    """Run a script in a separate process with JAX on the CPU."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([python, *arguments], env=environment, text=True, **options)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
