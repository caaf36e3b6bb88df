"""Test the benchmark of caches of keys and values, with small caches."""

import importlib
import pathlib

import pytest


BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
def test_table(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("kv_cache")
    kinds = "float32", "int8", "int4", "int4-rotated"
    small = ["--tokens", "64", "128", "--heads", "1", "--group", "2", "--seconds", "0"]
    script.main([*small, "--kv", *kinds, "--markdown"])
    lines = [x for x in capsys.readouterr().out.splitlines() if x[:1] == "|"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[:2] for row in rows] == [[k, n] for k in kinds for n in ("64", "128")]
    # Keys and values of size 64 with one scale per vector (INT8) or per 32 (INT4). The
    # last also has 4 sinks and 64 tokens with positions, for 64 tokens.
    last = f"{2 * 40 + 2 * (4 * 256 + 64 * 260) / 64:.0f}"
    assert [row[2] for row in rows[::2]] == ["512", "136", "80", last]
    bounds = {"float32": 1e-9, "int8": 0.02, "int4": 0.3, "int4-rotated": 0.3}
    for row in rows:
        assert min(float(x.replace(",", "")) for x in row[3:5]) > 0
        assert float(row[5]) < bounds[row[0]]
