"""Test the benchmark of low-precision training, with a model of a few thousand
weights."""

import importlib
import pathlib

import numpy as np
import pytest


BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("together", [[], ["--vmap"]])
def test_table_and_plot(together, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("low_precision")
    sizes = dict(size=32, layers=1, heads=2, kv_heads=1, head_size=16, hidden=64)
    config = script.train_small.Config(vocabulary=64, tied=True, **sizes)
    monkeypatch.setattr(script.train_small, "CONFIG", config)
    rng = np.random.default_rng(0)
    rows = script.train_small.pack(rng.integers(0, 64, (8, 17)).tolist(), 16)
    monkeypatch.setattr(script, "data", lambda: (rows, rows, 100))
    plot = tmp_path / "loss.png"
    command = [
        "--steps",
        "2",
        "--seeds",
        "0",
        "1",
        "--folder",
        str(tmp_path),
        *together,
    ]
    command += ["--rows", "float32", "int8, stochastic", "--states", "32", "8"]
    monkeypatch.setattr("sys.argv", ["", *command, "--plot", str(plot), "--markdown"])
    script.main()
    lines = [x for x in capsys.readouterr().out.splitlines() if x[:1] == "|"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    names = "float32", "int8, stochastic"
    assert [row[:3] for row in cells] == [
        [name, bits, "2"] for bits in ("32", "8") for name in names
    ]
    exact = float(cells[0][3])
    for row in cells[1:]:
        difference = float(row[4].split(" ±")[0])
        assert abs(float(row[3]) - exact - difference) < 2e-4  # Each has 4 digits.
    assert plot.exists()


def test_each_row_has_a_recipe(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("low_precision")
    for row in script.ROWS.values():
        recipe = script.recipe_of(row)
        assert (recipe is None) == (row.preset is None)
        assert recipe is None or recipe.stochastic == row.stochastic
