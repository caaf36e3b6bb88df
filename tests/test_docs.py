"""Every block of Python in the documentation runs."""

import inspect
import pathlib
import re
import sys
import textwrap
import types
from collections.abc import Iterator

import pytest
from eqquant.dispatch.rules import _registry
from helpers import slow
from public import names_at_the_top, public_names


ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_OF_API = sorted((ROOT / "docs" / "api").glob("*.md"))
FENCE = re.compile(r"^ *(?P<marks>`{3,}|~{3,}) *(?P<info>.*?) *$")
# A block without a language, or with an unknown one, could be Python that never runs.
LANGUAGES = {"python", "bash", "bibtex", "json", "mermaid", "text", "toml", "yaml"}


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield each block of Python and the line on which its code starts."""
    assert "<!-- skip" not in text, "no block may be skipped"
    opening = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opening is None:
            if fence:
                opening, start, lines = fence, number + 1, []
        elif fence and fence["marks"] == opening["marks"] and not fence["info"]:
            language = opening["info"].split(" ")[0]
            assert language in LANGUAGES, f"line {start - 1}: language {language!r}"
            if language == "python":
                yield start, textwrap.dedent("\n".join(lines))
            opening = None
        else:
            lines.append(line)
    assert opening is None, f"line {start - 1}: a block that is never closed"


def run(text: str, origin: str, monkeypatch, tmp_path):
    """Run the blocks in order, as one program."""
    monkeypatch.chdir(tmp_path)
    # Rules that a page registers are removed afterwards.
    rules = {name: list(known) for name, known in _registry._rules.items()}
    monkeypatch.setattr(_registry, "_rules", rules)
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for start, code in python_blocks(text):
        # The padding makes tracebacks point to the line of the page.
        code = compile("\n" * (start - 1) + code, origin, "exec", dont_inherit=True)
        exec(code, module.__dict__)


def docstrings() -> dict[str, str]:
    """Return the docstrings with code, of every public name and of its members."""
    found = {}
    for path, value in public_names().items():
        found[path] = value.__doc__
        if inspect.isclass(value):
            for member in vars(value):
                doc = getattr(getattr(value, member), "__doc__", None)
                found[f"{path}.{member}"] = doc
    return {
        name: inspect.cleandoc(doc)
        for name, doc in found.items()
        if isinstance(doc, str) and any(map(FENCE.match, doc.splitlines()))
    }


DOCSTRINGS = docstrings()


def by_time(page: pathlib.Path):
    """Mark a page as slow, unless it is one of the first pages for readers."""
    first = page.name in ("README.md", "index.md")
    return page if first else slow(page)


@pytest.mark.parametrize(
    "page", map(by_time, PAGES), ids=lambda page: str(page.relative_to(ROOT))
)
def test_page(page, monkeypatch, tmp_path):
    run(page.read_text(), str(page), monkeypatch, tmp_path)


SLOW = (
    "eqquant.allocate",
    "eqquant.calibrate",
    "eqquant.calibration.Allocation",
    "eqquant.calibration.Statistics",
    "eqquant.formats.QuantizedOffsets",
    "eqquant.Int2",
    "eqquant.Int3",
    "eqquant.NF2",
    "eqquant.training.distill",
    "eqquant.training.with_dropout_key",
)


@pytest.mark.parametrize("name", [slow(x) if x in SLOW else x for x in DOCSTRINGS])
def test_docstring(name, monkeypatch, tmp_path):
    run(DOCSTRINGS[name], f"<docstring of {name}>", monkeypatch, tmp_path)


def test_every_public_name_is_in_the_api_pages():
    text = "\n".join(page.read_text() for page in PAGES_OF_API)
    listed = re.findall(r"^::: (eqquant\.\S+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(public_names())


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_example(name):
    assert list(python_blocks(DOCSTRINGS.get(name, "")))


def test_everyday_names_are_few():
    assert len(names_at_the_top()) <= 35


@pytest.mark.parametrize(
    "text",
    [
        "<!-- skip: slow -->\n```python\n```",
        "```\nx = 1\n```",
        "```py\nx = 1\n```",
        "```python\nx = 1",
    ],
)
def test_no_block_escapes(text):
    with pytest.raises(AssertionError):
        list(python_blocks(text))


def test_blocks_are_found():
    text = "A\n\n```python\nx = 1\n```\n\n!!! note\n\n    ```python\n    y = x\n    ```"
    assert list(python_blocks(text)) == [(4, "x = 1"), (10, "y = x")]
