"""Test that README.md and the documentation quote the tables of the benchmarks."""

import importlib
import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
TABLES = sorted((DOCS / "benchmarks" / "tables").glob("*.md"))
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


@pytest.fixture
def summary(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("summary")


@pytest.mark.parametrize(
    "name,options", [("summary", []), ("platforms", ["--platforms"])]
)
def test_summary_is_up_to_date(summary, tmp_path, name, options):
    summary.main([*options, "--output", str(tmp_path / "table.md")])
    expected = (DOCS / "benchmarks" / "tables" / f"{name}.md").read_text()
    assert (tmp_path / "table.md").read_text() == expected
    assert expected.strip() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("option", ["--plot", "--plot-language"])
def test_plots(summary, tmp_path, option):
    pytest.importorskip("matplotlib")
    summary.main([option, str(tmp_path / "accuracy.png")])
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_table(path):
    """Rows of a table have the same number of cells, and a page includes the file."""
    tables = re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE)
    assert tables
    for lines in map(str.splitlines, tables):
        assert len(lines) > 2
        assert len({line.count(" | ") for line in lines}) == 1
    included = [
        name
        for page in DOCS.rglob("*.md")
        for name in INCLUDE.findall(page.read_text())
    ]
    assert path.relative_to(DOCS).as_posix() in included


def test_every_script_is_listed():
    text = (BENCHMARKS / "README.md").read_text()
    for path in BENCHMARKS.glob("[a-z]*.py"):
        assert f"`{path.name}`" in text
    text = (BENCHMARKS / "static" / "README.md").read_text()
    for path in (BENCHMARKS / "static").glob("*.py"):
        assert f"`{path.name}`" in text


def test_rotation_benchmark(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    importlib.import_module("hadamard").main(["--sizes", "96", "--rows", "8"])
    *_, row = capsys.readouterr().out.splitlines()
    size, block, rows, *times = row.split()
    assert (size, block, rows) == ("96", "32", "8")
    assert all(float(time) > 0 for time in times)
