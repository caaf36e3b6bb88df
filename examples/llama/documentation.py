"""The documentation of Python, as training text.

It consists of the docstrings of the installed standard library and the topics of
`help()`, under the PSF licence.
"""

import ast
import pathlib
import sys
import zlib
from collections.abc import Iterator
from pydoc_data import topics


sys.path.append(str(pathlib.Path(__file__).parents[1]))
import _standard_library


# One in `HELD_OUT` documents is held out.
HELD_OUT = 12


def read_documents() -> tuple[list[str], list[str]]:
    """Return training documents and held-out documents.

    A document is a topic, or all docstrings of a module. Its name determines its group.
    The groups share no docstring: a docstring in several modules belongs to the first
    of them, and held-out modules come first.
    """
    found = [(f"topic {name}", [text]) for name, text in topics.topics.items()]
    found += list(_modules())
    is_held_out = lambda name: zlib.crc32(name.encode()) % HELD_OUT == 0
    seen: set[str] = set()
    training, held_out = [], []
    for name, parts in sorted(found, key=lambda f: (not is_held_out(f[0]), f[0])):
        new = []
        for part in parts:
            # The same docstring can occur with different signatures.
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
    """Yield each docstring, after a line with the name of its object."""
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
