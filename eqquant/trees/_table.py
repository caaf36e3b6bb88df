"""Tables for terminals and for notebooks. The first row is the header."""

import html
from collections.abc import Sequence


Rows = Sequence[Sequence[str]]

_left = ("path", "shape", "axis", "format", "type", "in eqquant", "kept by", "")
# Sorts by a column: numbers by value, and the largest first on the first click.
_sort = (
    "const body = this.closest('table').tBodies[0], i = this.cellIndex;"
    "const down = this.dataset.down = this.dataset.down === '1' ? '0' : '1';"
    "const value = row => {"
    "const text = row.cells[i].textContent, x = parseFloat(text.replace(/,/g, ''));"
    "return isNaN(x) ? text || -Infinity : x};"
    "[...body.rows].sort((a, b) => (value(a) > value(b) ? 1 : -1) * (1 - 2 * down))"
    ".forEach(row => body.append(row))"
)


def as_text(rows: Rows) -> list[str]:
    """Return one line per row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in _left else cell.rjust(width)
            for name, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def as_html(rows: Rows, total: Sequence[str], caption: str = "") -> str:
    """Return a table with a total. A click on a name in the header sorts by it."""

    def line(row, tag, attributes=""):
        cells = (
            f'<{tag} style="text-align: {"left" if name in _left else "right"}"'
            f"{attributes}>{html.escape(cell)}</{tag}>"
            for name, cell in zip(rows[0], row, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    head = line(rows[0], "th", f' onclick="{html.escape(_sort)}"')
    body = "".join(line(row, "td") for row in rows[1:])
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead>{head}</thead>"
        f"<tbody>{body}</tbody><tfoot>{line(total, 'th')}</tfoot></table>"
    )
