"""Test the GPU benchmark on the CPU, with small sizes."""

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


def test_missing_gpu_raises(script):
    with pytest.raises(SystemExit, match="GPU.*cpu") as error:
        script.main([])
    assert error.value.code != 0


def test_table(script, capsys):
    script.main([*TINY, "--formats", "nf4", "w8a8", "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[c.strip() for c in x.split("|")[1:-1]] for x in lines if x[:1] == "|"]
    head, _, *rows = rows
    assert head == list(script.HEAD)
    variants = ["dense", "eqquant", "XLA", "dense first"]
    expected = [(f, v) for f in ("nf4", "w8a8") for v in [*variants, "quantize"]]
    assert [(row[2], row[3]) for row in rows] == expected
    for row in rows:
        assert row[0] == "64x96" and float(row[4].split()[0]) > 0
        if row[3] in variants[1:]:
            assert 0 < float(row[7]) < {"nf4": 6e-3, "w8a8": 2e-2}[row[2]]


def test_output_file(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "products", lambda *_: [])
    monkeypatch.setattr(script, "encoding", lambda *_: ["x"] * len(script.HEAD))
    path = tmp_path / "tables" / "gpu.md"
    script.main([*TINY, "--formats", "nf4", "--output", str(path)])
    assert not capsys.readouterr().out
    lines = path.read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 3


def test_library_that_fails_to_install_is_listed(script, capsys, monkeypatch):
    def install(*_):
        raise RuntimeError("cannot be installed: no such package")

    monkeypatch.setattr(script, "install", install)
    monkeypatch.setattr(script, "products", lambda *_: [])
    monkeypatch.setattr(script, "encoding", lambda *_: ["x"] * len(script.HEAD))
    script.main([*TINY, "torchao"])
    out = capsys.readouterr().out
    assert "NOT MEASURED: torchao: cannot be installed: no such package" in out


class Fake(np.ndarray):
    """An array with the methods of PyTorch tensors that the script calls."""

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


def test_other_library_is_compared_with_dense(script, torch, capsys, monkeypatch):
    peers = importlib.import_module("_gpu_peers")

    def broken(w):
        raise ValueError("broken format")

    formats = {"int8": lambda w: (lambda x: x @ w.T, 100), "int4": broken}
    peer = peers.GPUPeer("fake", (), lambda: formats)
    monkeypatch.setattr(peers, "peers", [peer])
    options = dict(platform="cpu", sizes=[[64, 96]], m=[3], group=2)
    measuring = importlib.import_module("_measure_gpu_peer")
    measuring.measure("fake", dict(**options, seconds=0, gigabytes=0))
    lines = capsys.readouterr().out.splitlines()
    rows = dense, int8, int4 = [json.loads(line) for line in lines]
    assert all(len(row) == len(script.HEAD) for row in rows)
    assert dense[:4] == ["64x96", 3, "", "dense (fake) (no graph)"]
    assert int8[:4] == ["64x96", 3, "int8", "fake (no graph)"]
    assert float(dense[6]) == 1 and float(int8[6]) > 0
    assert int4[2:5] == ["int4", "fake fails", "ValueError: broken format"]


def test_rotation_fills_the_requested_bytes(script):
    rotation = importlib.import_module("_rotation")
    made = []
    groups = rotation.rotation(lambda: made.append(0) or len(made), 3, 60e-9, 4)
    assert [next(groups) for _ in range(6)][::5] == [(1, 2, 3, 4), (1, 2, 3, 4)]
    assert len(made) == 20
    assert rotation.sizes_for(10) == (32, 8)
    assert rotation.sizes_for(10**8) == (10, 1)
    assert rotation.sizes_for(10**10) == (1, 1)
    assert rotation.summary([4.0, 1.0, 2.0], 2) == (1e6, 5e5)
