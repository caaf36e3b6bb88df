"""Every notebook of the documentation runs, and its stored outputs are up to date."""

import json
import pathlib
import re

import pytest


DOCS = pathlib.Path(__file__).parent.parent / "docs"
NUMBER = re.compile(r"[\d.,]+")


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCS.rglob("*.ipynb"), ids=lambda path: path.name)
def test_notebook(path, capsys):
    """Outputs are compared without numbers, which depend on the machine."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    names: dict = {}
    for cell in code:
        exec("".join(cell["source"]), names)
        stored = [
            "".join(output["text"])
            for output in cell["outputs"]
            if output["output_type"] == "stream"
        ]
        printed = capsys.readouterr().out
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", "".join(stored))
        assert cell["outputs"] or "print(" not in "".join(cell["source"])
