"""The script that measures on a GPU, tried out without one."""

import importlib
import json
import pathlib
import sys
from types import SimpleNamespace

import numpy as np
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


class Fake(np.ndarray):
    """An array that knows of PyTorch's what the script calls."""

    bfloat16 = lambda self: self.astype(np.float32)
    clone = np.ndarray.copy
    element_size = lambda self: self.itemsize


@pytest.fixture
def torch(monkeypatch):
    def randn(*shape, device):
        assert device == "cpu"
        return np.zeros(shape).view(Fake)

    functional = SimpleNamespace(linear=lambda x, w: x @ w.T)
    nn = SimpleNamespace(functional=functional)
    fake = SimpleNamespace(randn=randn, nn=nn, set_grad_enabled=lambda _: None)
    monkeypatch.setitem(sys.modules, "torch", fake)


def test_other_libraries_are_measured_beside_dense(script, torch, capsys, monkeypatch):
    peers = importlib.import_module("_gpu_peers")

    def broken(w):
        raise ValueError("not this one")

    formats = {"int8": lambda w: (lambda x: x @ w.T, 100), "int4": broken}
    peer = peers.GPUPeer("fake", (), lambda: formats)
    monkeypatch.setattr(peers, "peers", [peer])
    options = dict(platform="cpu", sizes=[[64, 96]], m=[3], group=2)
    measuring = importlib.import_module("_measure_gpu_peer")
    measuring.measure("fake", dict(**options, seconds=0, gigabytes=0))
    lines = capsys.readouterr().out.splitlines()
    rows = dense, int8, int4 = [json.loads(line) for line in lines]
    assert all(len(row) == len(script.HEAD) for row in rows)
    assert dense[:4] == ["64x96", 3, "", "dense, beside fake (no graph)"]
    assert int8[:4] == ["64x96", 3, "int8", "fake (no graph)"]
    assert float(dense[6]) == 1 and float(int8[6]) > 0
    assert int4[2:5] == ["int4", "fake fails", "ValueError: not this one"]


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
