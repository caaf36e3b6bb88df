"""The `--help` of each example: whole sentences, with the defaults."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest


EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PROGRAMS = [
    path
    for path in sorted(EXAMPLES.rglob("*.py"))
    if "add_argument" in path.read_text()
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_options_have_sentences_and_defaults(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree).splitlines()[0].endswith((".", "?"))
    calls = [
        {keyword.arg: keyword.value for keyword in node.keywords}
        | {"name": node.args[0]}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", None) == "add_argument"
    ]
    assert calls
    for call in calls:
        name, text = ast.literal_eval(call["name"]), ast.literal_eval(call["help"])
        assert text[0].isupper() and text.endswith("."), name
        if isinstance(call.get("default"), ast.Constant):
            assert "%(default)s" in text, name
        elif name.startswith("--") and "action" not in call:
            # Default paths depend on the machine, so the text contains only their end.
            assert "default" in text and "%(default)s" not in text, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in PROGRAMS if "choices=" in path.read_text()],
    ids=lambda path: path.stem,
)
def test_choices_are_apart(path):
    """The commas between choices are the only commas, so that each can be copied."""
    env = os.environ | {"COLUMNS": "1000"}
    command = [sys.executable, path, "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    for choices in re.findall("{(.*?)}", done.stdout):
        assert ", " not in choices
