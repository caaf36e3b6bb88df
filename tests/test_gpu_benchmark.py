"""The script that measures on a GPU, tried out without one."""

import importlib
import pathlib

import pytest


BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
TINY = ["--platform", "cpu", "--sizes", "64x96", "--m", "3", "--seconds", "0"]
TINY += ["--gigabytes", "0", "--group", "2", "--peers"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def test_without_a_gpu_it_says_so(script):
    with pytest.raises(SystemExit, match="needs a GPU, and JAX has none") as left:
        script.main([])
    assert left.value.code != 0


def test_its_table(script, capsys):
    script.main([*TINY, "--formats", "nf4", "w8a8", "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[c.strip() for c in x.split("|")[1:-1]] for x in lines if x[:1] == "|"]
    head, _, *rows = rows
    assert head == list(script.HEAD)
    by = ["dense", "eqquant", "XLA", "dense first"]
    named = [(name, x) for name in ("nf4", "w8a8") for x in [*by, "encode, of a copy"]]
    assert [(row[2], row[3]) for row in rows] == named
    for row in rows:
        assert row[0] == "64x96" and float(row[4].split()[0]) > 0
        if row[3] in by[1:]:
            assert 0 < float(row[7]) < {"nf4": 6e-3, "w8a8": 2e-2}[row[2]]


def test_a_library_that_cannot_be_measured_is_named(script, capsys, monkeypatch):
    def install(*_):
        raise RuntimeError("cannot be installed: no such package")

    monkeypatch.setattr(script, "install", install)
    monkeypatch.setattr(script, "products", lambda *_: [])
    monkeypatch.setattr(script, "encoding", lambda *_: ["x"] * len(script.HEAD))
    script.main([*TINY, "torchao"])
    out = capsys.readouterr().out
    assert "NOT MEASURED: torchao: cannot be installed: no such package" in out


def test_rotation_holds_what_is_asked_for(script):
    rotation = importlib.import_module("_rotation")
    made = []
    turns = rotation.rotation(lambda: made.append(0) or len(made), 3, 60e-9, 4)
    assert [next(turns) for _ in range(6)][::5] == [(1, 2, 3, 4), (1, 2, 3, 4)]
    assert len(made) == 20
    assert rotation.sizes_for(10) == (32, 8)
    assert rotation.sizes_for(10**8) == (10, 1)
    assert rotation.sizes_for(10**10) == (1, 1)
    assert rotation.summary([4.0, 1.0, 2.0], 2) == (1e6, 5e5)
