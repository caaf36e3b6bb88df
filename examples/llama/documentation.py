"""The documentation that Python ships, as text to train on.

It is the docstrings of the standard library, and the topics of `help()`, under the PSF
licence, and read from the Python that runs this."""

import ast
import pathlib
import sys
import zlib
from collections.abc import Iterator
from pydoc_data import topics


sys.path.append(str(pathlib.Path(__file__).parents[1]))
import _standard_library


# One document of so many is held out.
HELD_OUT = 12


def read_documents() -> tuple[list[str], list[str]]:
    """Documents to train on, and those that are held out.

    A document is a topic, or all that is said about a module; its name decides where it
    goes. No docstring is in both: one that several modules have is only in the first of
    them, and modules that are held out come first.
    """
    found = [(f"topic {name}", [text]) for name, text in topics.topics.items()]
    found += list(_modules())
    is_held_out = lambda name: zlib.crc32(name.encode()) % HELD_OUT == 0
    seen: set[str] = set()
    training, held_out = [], []
    for name, parts in sorted(found, key=lambda f: (not is_held_out(f[0]), f[0])):
        new = []
        for part in parts:
            # Signatures differ where docstrings are the same.
            docstring = part.partition("\n")[2] or part
            if docstring not in seen:
                seen.add(docstring)
                new.append(part)
        if new:
            (held_out if is_held_out(name) else training).append("\n\n".join(new))
    return training, held_out


def _modules() -> Iterator[tuple[str, list[str]]]:
    for name, tree in _standard_library.modules():
        if parts := list(_docstrings(tree, name)):
            yield name, parts


def _docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Each docstring below a line that says what it is about."""
    if text := ast.get_docstring(node):
        if isinstance(node, ast.Module):
            title = f"module {name}"
        elif isinstance(node, ast.ClassDef):
            title = f"class {name}"
        else:
            title = f"{name}({ast.unparse(node.args)})"
        yield f"{title}\n{text.strip()}"
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
