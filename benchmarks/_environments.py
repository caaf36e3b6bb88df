"""Each of the other libraries is installed into its own environment, which is kept."""

import os
import pathlib
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence


CACHE = (
    pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    / "eqquant-peers"
)


def install(name: str, packages: Sequence[str], cache: pathlib.Path) -> str:
    """The Python of an environment; a `RuntimeError` says why there is none."""
    folder = cache / name
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists() or done.read_text().split("\n") != list(packages):
        print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        ran = subprocess.run([*command, *packages], capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"cannot be installed: {last_line(ran.stderr)}")
        done.write_text("\n".join(packages))
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
