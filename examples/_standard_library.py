"""The modules of the standard library, as a source of documentation."""

import ast
import pathlib
import sysconfig
from collections.abc import Iterator


NOT_DOCUMENTED = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "site-packages",
    "dist-packages",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name of each module, such as `xml.dom`, and its syntax tree."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if NOT_DOCUMENTED & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # Some test modules have intentional syntax errors.
        yield ".".join(parts).removesuffix(".__init__"), tree
