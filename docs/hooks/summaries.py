"""Tables of names for the API pages, which MkDocs runs as a hook.

A page with `::: eqquant.name` directives gets a table of these names before the first
one. `<!-- all names -->` on the index becomes the tables of all pages.
"""

import pathlib
import pydoc
import re


FOLDER = pathlib.Path(__file__).parents[1] / "api"
DIRECTIVE = re.compile(r"^::: (eqquant\.\S+)$", re.MULTILINE)


def on_page_markdown(markdown: str, page, **_) -> str:
    if not page.file.src_uri.startswith("api/"):
        return markdown
    first = DIRECTIVE.search(markdown)
    if first:
        table = summaries(DIRECTIVE.findall(markdown))
        return f"{markdown[: first.start()]}{table}\n\n{markdown[first.start() :]}"
    return markdown.replace("<!-- all names -->", "\n\n".join(map(section, pages())))


def on_page_content(html: str, **_) -> str:
    """Keep source code out of the search."""
    opening = '<details class="mkdocstrings-source"'
    return html.replace(opening, f"{opening} data-search-exclude")


def pages() -> list[pathlib.Path]:
    return sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")


def section(path: pathlib.Path) -> str:
    text = path.read_text()
    title = text.splitlines()[0].removeprefix("# ")
    return f"## [{title}]({path.name})\n\n{summaries(DIRECTIVE.findall(text))}"


def summaries(names: list[str]) -> str:
    rows = (f"| [`{name}`][{name}] | {summary(name)} |" for name in names)
    return "\n".join(["| name | summary |", "|---|---|", *rows])


def summary(name: str) -> str:
    """Return the first sentence of a docstring."""
    paragraph = (pydoc.locate(name).__doc__ or "").strip().split("\n\n")[0]
    line = " ".join(paragraph.split()).replace("|", "\\|")
    return re.split(r"(?<=\.) (?=[A-Z{`0-9])", line)[0]
