"""What the documentation shows works: every block of Python in it runs."""

import inspect
import pathlib
import re
import sys
import textwrap
import types
from collections.abc import Iterator

import eqquant
import eqquant.debug
import pytest
from eqquant.dispatch.rules import _registry
from helpers import slow


ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_OF_API = ROOT / "docs" / "api.md"
FENCE = re.compile(r"^ *(?P<marks>`{3,}|~{3,}) *(?P<info>.*?) *$")
# A block without a language, or in another one, could be Python that is never run.
LANGUAGES = {"python", "bash", "bibtex", "json", "mermaid", "text", "toml", "yaml"}


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Each block of Python, and the line on which its code starts."""
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
    """Run the blocks one after the other, as the program that a reader would type."""
    monkeypatch.chdir(tmp_path)
    # What a page registers stays in the page.
    rules = {name: list(known) for name, known in _registry._rules.items()}
    monkeypatch.setattr(_registry, "_rules", rules)
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for start, code in python_blocks(text):
        # The padding makes a traceback point to the line in the page.
        code = compile("\n" * (start - 1) + code, origin, "exec", dont_inherit=True)
        exec(code, module.__dict__)


def public_names(module: types.ModuleType) -> Iterator[str]:
    """Those that are ours: a module may import others without an underscore, too."""
    inside = "eqquant" if module is eqquant else module.__name__
    for name, value in vars(module).items():
        private = name.startswith("_") or inspect.ismodule(value)
        origin = getattr(value, "__module__", inside)
        if not private and f"{origin}.".startswith(f"{inside}."):
            yield name


def docstrings() -> dict[str, str]:
    """Those with code in them, of every public name and its members."""
    found = {}
    for module in (eqquant, eqquant.debug):
        for name in public_names(module):
            value = getattr(module, name)
            found[f"{module.__name__}.{name}"] = value.__doc__
            if inspect.isclass(value):
                for member in vars(value):
                    doc = getattr(getattr(value, member), "__doc__", None)
                    found[f"{module.__name__}.{name}.{member}"] = doc
    return {
        name: inspect.cleandoc(doc)
        for name, doc in found.items()
        if isinstance(doc, str) and any(map(FENCE.match, doc.splitlines()))
    }


DOCSTRINGS = docstrings()


def by_time(page: pathlib.Path):
    """Fast are those that one reads first."""
    first = page.name in ("README.md", "index.md")
    return page if first else slow(page)


@pytest.mark.parametrize(
    "page", map(by_time, PAGES), ids=lambda page: str(page.relative_to(ROOT))
)
def test_page(page, monkeypatch, tmp_path):
    run(page.read_text(), str(page), monkeypatch, tmp_path)


SLOW = ("allocate", "calibrate", "distill", "with_dropout_key")
SLOW = tuple(f"eqquant.{name}" for name in SLOW)


@pytest.mark.parametrize("name", [slow(x) if x in SLOW else x for x in DOCSTRINGS])
def test_docstring(name, monkeypatch, tmp_path):
    run(DOCSTRINGS[name], f"<docstring of {name}>", monkeypatch, tmp_path)


def test_every_public_name_is_in_the_api_page():
    listed = re.findall(r"^::: eqquant\.(\S+)$", PAGE_OF_API.read_text(), re.MULTILINE)
    debug = {f"debug.{name}" for name in public_names(eqquant.debug)}
    assert set(listed) == {*public_names(eqquant), *debug}


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


def test_the_blocks_are_found():
    text = "A\n\n```python\nx = 1\n```\n\n!!! note\n\n    ```python\n    y = x\n    ```"
    assert list(python_blocks(text)) == [(4, "x = 1"), (10, "y = x")]
