"""Print tables as aligned text or as Markdown, to standard output or to a file."""

import argparse
import contextlib
import pathlib
from collections.abc import Iterator, Sequence


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument(
        "--output", type=pathlib.Path, help="write Markdown to this file instead"
    )


@contextlib.contextmanager
def output(options: argparse.Namespace) -> Iterator[None]:
    """Redirect standard output to the file `--output`, if the user names one."""
    if options.output is None:
        yield
        return
    options.markdown = True
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as file, contextlib.redirect_stdout(file):
        yield


def format_row(
    cells: Sequence[object], widths: Sequence[int], markdown: bool = False
) -> str:
    """Format one row of a table that prints each row immediately."""
    padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded)


def print_head(head: Sequence[str], widths: Sequence[int], markdown: bool) -> None:
    print(format_row(head, widths, markdown))
    if markdown:
        print(format_row(["---"] * len(head), widths, markdown))


def print_table(rows: Sequence[Sequence[str]], markdown: bool) -> None:
    """Print a complete table. The first row is the head."""
    if markdown:
        rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows), flush=True)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), flush=True)
