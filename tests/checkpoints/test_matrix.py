"""The table of formats and libraries."""

import pathlib

import pytest
from matrix import table


DOCS = pathlib.Path(__file__).parents[2] / "docs/serving-elsewhere.md"


@pytest.mark.slow
def test_the_table_in_the_docs_is_current():
    """To renew it, paste the output of `python tests/checkpoints/matrix.py`."""
    assert table() in DOCS.read_text()
