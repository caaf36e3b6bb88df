"""The library of native kernels: compiled, found, switched off."""

import os
import subprocess
import sys

import pytest
from eqquant.kernels import cpu
from eqquant.kernels.cpu import _build, _library


library = cpu.load()
needs_library = pytest.mark.skipif(
    isinstance(library, str), reason=f"NATIVE KERNELS NOT RUN: {library}"
)


def status_with(setting):
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from eqquant.kernels import cpu; print(cpu.status())",
        ],
        env={**os.environ, "EQQUANT_CPU": setting},
        capture_output=True,
        text=True,
    )


@needs_library
def test_the_switch():
    assert "switched off (EQQUANT_CPU=off)" in status_with("off").stdout
    assert "must be one of" in status_with("sse").stderr


@needs_library
def test_a_library_older_than_its_sources_is_not_used(monkeypatch):
    monkeypatch.delenv("EQQUANT_CPU", raising=False)
    monkeypatch.setattr(_library, "fingerprint", lambda: "other")
    assert "older than their sources" in _library.load.__wrapped__()


@needs_library
def test_a_library_for_a_later_jax_is_not_used(monkeypatch):
    monkeypatch.delenv("EQQUANT_CPU", raising=False)
    monkeypatch.setattr(_library, "_interface_of_xla", lambda: 0)
    assert "built for a later JAX" in _library.load.__wrapped__()


def test_without_a_library_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("EQQUANT_CPU", raising=False)
    monkeypatch.setattr(_library, "library", tmp_path / "missing.so")
    assert "without native kernels" in _library.load.__wrapped__()
    (tmp_path / "missing.so").write_bytes(b"not a library")
    assert "cannot be loaded" in _library.load.__wrapped__()


def test_without_a_compiler_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(_build.CannotBuild, match=r"no C\+\+ compiler|x86-64"):
        _build.build(tmp_path / "out.so")


# A fake compiler that writes its arguments and inputs to its output.
COMPILER = """#!/bin/sh
cd {0}; echo "$@" >> calls
if [ "$1" = -v ]; then cat version; exit; fi
for out; do :; done
case "$1" in
    -shared) cat objects > "$out"; rm objects;;
    *) echo "$@" >> objects;;
esac
"""


@pytest.fixture
def fake_build(monkeypatch, tmp_path):
    """Compile sources in `tmp_path`. Return whether anything was compiled."""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(COMPILER.format(tmp_path))
    compiler.chmod(0o755)
    for name in (
        "version",
        "src/runtime/a.cpp",
        "src/runtime/a.h",
        "include/api/ffi.h",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(_build, "_sources", tmp_path / "src")
    monkeypatch.setattr(_build, "compiler", lambda: str(compiler))
    monkeypatch.setattr(_build, "include_dir", lambda: str(tmp_path / "include"))

    def build():
        calls.write_text("")
        _build.build(tmp_path / "library.so")
        return "-shared" in calls.read_text()

    assert build()
    assert not build()
    return build


@pytest.mark.parametrize(
    "what", ["version", "src/runtime/a.cpp", "src/runtime/a.h", "include/api/ffi.h"]
)
def test_a_library_is_compiled_anew_when_a_file_changes(what, fake_build, tmp_path):
    before = (tmp_path / "library.so").read_bytes()
    (tmp_path / what).write_text("2")
    assert fake_build()
    assert not fake_build()
    assert (tmp_path / "library.so").read_bytes() != before


@pytest.mark.parametrize("machine, other", [("x86_64", "arm"), ("arm64", "x86")])
def test_only_the_sources_of_the_machine_are_compiled(
    machine, other, fake_build, monkeypatch, tmp_path
):
    for name in ("x86", "arm"):
        (tmp_path / "src/runtime" / name).mkdir()
        (tmp_path / "src/runtime" / name / "kernels.cpp").write_text("1")
    monkeypatch.setattr(_build.platform, "machine", lambda: machine)
    assert fake_build()
    calls = (tmp_path / "calls").read_text()
    assert f"src/runtime/{_build.architecture()}/kernels.cpp" in calls
    assert f"src/runtime/{other}/kernels.cpp" not in calls


def test_a_library_is_compiled_anew_when_flags_change(fake_build, monkeypatch):
    monkeypatch.setattr(_build, "_flags", [*_build._flags, "-g"])
    assert fake_build()


def test_a_library_is_not_linked_from_sources_that_changed(
    fake_build, monkeypatch, tmp_path
):
    run = _build._run

    def edit_and_run(command):
        (tmp_path / "src/runtime/a.h").write_text("3")
        return run(command)

    (tmp_path / "src/runtime/a.h").write_text("2")
    monkeypatch.setattr(_build, "_run", edit_and_run)
    with pytest.raises(_build.CannotBuild, match="changed while"):
        fake_build()
