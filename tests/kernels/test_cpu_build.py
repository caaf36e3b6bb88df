"""The build of the native library: requirements and errors."""

import builtins
import os
import platform
import runpy
import subprocess
import sys

import pytest
from eqquant.kernels.cpu import _build


@pytest.fixture
def on_x86(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.skipif(os.name != "posix", reason="no shell")
def test_the_compiler_that_is_asked_for(monkeypatch, tmp_path, on_x86):
    for name in ("g++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert _build.compiler() == str(tmp_path / "g++")
    monkeypatch.setenv("CXX", "mine")
    assert _build.compiler() == str(tmp_path / "mine")
    monkeypatch.setenv("CXX", "missing")
    assert _build.compiler() == str(tmp_path / "g++")


def test_other_machines_have_no_native_kernels(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(_build.CannotBuild, match="for x86-64 and .* on riscv64"):
        _build.compiler()


def test_without_jax_there_are_no_header_files(monkeypatch):
    found = builtins.__import__

    def without_jax(name, *args):
        if name == "jax":
            raise ImportError("No module named 'jax'")
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_jax)
    with pytest.raises(_build.CannotBuild, match="header files.*No module named 'jax'"):
        _build.include_dir()


@pytest.mark.parametrize("fails", ["compiler", "linker"])
@pytest.mark.parametrize("machine, folder", [("x86_64", "x86"), ("arm64", "arm")])
def test_failed_build_shows_the_error_and_keeps_the_library(
    monkeypatch, tmp_path, machine, folder, fails
):
    """A failed build leaves the previous library."""
    calls = []

    def run(command):
        calls.append(command)
        is_it = ("-shared" in command) == (fails == "linker")
        said = f"{fails}: something is wrong\n" if is_it else ""
        return subprocess.CompletedProcess(command, int(is_it), stderr=said)

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(_build, "compiler", lambda: "c++")
    monkeypatch.setattr(_build, "include_dir", lambda: str(tmp_path))
    monkeypatch.setattr(_build, "recipe", lambda *_: "a recipe")
    monkeypatch.setattr(_build, "_run", run)
    library, said = tmp_path / "library.so", []
    library.write_bytes(b"the old one")
    with pytest.raises(_build.CannotBuild, match=f"the {fails} failed:\n{fails}: some"):
        _build.build(library, said.append)
    assert library.read_bytes() == b"the old one"
    sources = sorted(map(str, _build.sources_of(folder)))
    compiled = sorted(c[c.index("-c") + 1] for c in calls if "-c" in c)
    assert compiled == sources and len(said) == 1
    assert f"{len(sources)} files" in said[0]


def test_every_source_is_for_an_architecture():
    """Sources in no known folder would silently be left out."""
    found = {path for machine in _build._folders for path in _build.sources_of(machine)}
    assert found == set(_build._sources.rglob("*.cpp"))


@pytest.mark.slow
def test_each_header_compiles_by_itself(tmp_path):
    """A header includes everything that it uses, in any order."""
    machine = _build.architecture()
    try:
        compiler, xla = _build.compiler(), _build.include_dir()
    except _build.CannotBuild as problem:
        pytest.skip(str(problem))
    others = {
        name
        for other, folders in _build._folders.items()
        if other != machine
        for name in folders
    }
    headers = [
        path.relative_to(_build._sources)
        for path in sorted(_build._sources.rglob("*.h"))
        if others.isdisjoint(path.parts)
    ]
    # Twice, in one file each: `#pragma once` is there, and nothing came before.
    for i, header in enumerate(headers):
        line = f'#include "{header.as_posix()}"\n'
        (tmp_path / f"{i}.cpp").write_text(line + line)
    flags = ["-std=c++17", "-fsyntax-only", "-I", str(_build._sources), "-isystem", xla]
    for source in sorted(tmp_path.glob("*.cpp")):
        done = subprocess.run(
            [compiler, *flags, str(source)], capture_output=True, text=True
        )
        assert not done.returncode, source.read_text() + done.stderr


def test_cores_are_those_of_the_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    assert _build._cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert _build._cores() == 1


def test_the_program_says_why_it_cannot(monkeypatch, tmp_path, on_x86):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "argv", ["_build.py"])
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler was found|not for"):
        runpy.run_path(_build.__file__, run_name="__main__")
