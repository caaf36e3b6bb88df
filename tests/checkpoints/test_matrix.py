"""The table of formats and libraries."""

import pathlib

import pytest
from matrix import table


DOCS = pathlib.Path(__file__).parents[2] / "docs/tables/formats-by-library.md"


@pytest.mark.slow
def test_the_table_in_the_docs_is_current():
    """To renew it, write the output of `python tests/checkpoints/matrix.py` to it."""
    assert DOCS.read_text() == table() + "\n"
