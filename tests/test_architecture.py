"""The floors and walls that CONTRIBUTING.md describes."""

import ast
import fnmatch
import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "eqquant"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def read_floors() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"test_architecture.*?```text\n(.*?)```", text, re.DOTALL)
    return [line.split()[0] for line in block.splitlines()]


FLOORS = read_floors()


def floor_of(file: str) -> int:
    """That which names the file; otherwise that whose pattern fits."""
    if file in FLOORS:
        return FLOORS.index(file)
    fitting = [i for i, floor in enumerate(FLOORS) if fnmatch.fnmatch(file, floor)]
    assert len(fitting) == 1, f"{file} is not in the list of CONTRIBUTING.md"
    return fitting[0]


def parse(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(), file)


def is_type_checking(node: ast.AST) -> bool:
    names = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.If) and ast.unparse(node.test) in names


def walk(node: ast.AST):
    """All that can run, wherever it is nested."""
    yield node
    children = node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from walk(child)


def file_of(module: str) -> str | None:
    path = module.removeprefix("eqquant").removeprefix(".").replace(".", "/")
    names = f"{path}.py", f"{path}/__init__.py".lstrip("/")
    return next((name for name in names if name in FILES), None)


def imports(file: str) -> set[str]:
    """The absolute name of each module that a file imports.

    Of `from a import b` both `a` and `a.b`, which may or may not be a module.
    """
    package = ["eqquant", *file.split("/")[:-1]]
    found = set()
    for node in walk(parse(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            members = {f"{origin}.{alias.name}" for alias in node.names}
            # `from . import a` asks for the module `a`, not for the package.
            only_modules = node.module is None and all(map(file_of, members))
            found |= members if only_modules else {origin, *members}
    return found


def imported_files(file: str) -> set[str]:
    ours = {m for m in imports(file) if m == "eqquant" or m.startswith("eqquant.")}
    return set(filter(None, map(file_of, ours)))


def test_every_file_has_a_floor():
    for file in FILES:
        floor_of(file)


def test_every_floor_has_a_file():
    for floor in FLOORS:
        assert fnmatch.filter(FILES, floor), floor


@pytest.mark.parametrize("file", FILES)
def test_imports_only_from_below(file):
    for other in imported_files(file):
        assert floor_of(other) < floor_of(file), f"{file} imports {other}"


def test_the_imports_are_found():
    # The tests above would pass if no import were ever found.
    assert "kernels/xla.py" in imported_files("_dot.py")
    assert "formats/_format.py" in imported_files("formats/_int8.py")
    assert "rules/_registry.py" in imported_files("rules/__init__.py")
    assert imported_files("__init__.py")


@pytest.mark.parametrize("file", [file for file in FILES if file != "_compat.py"])
def test_only_compat_depends_on_the_version_of_jax(file):
    source = (PACKAGE / file).read_text()
    assert not re.search(r"\bjax\b.*\b_src\b", source)
    assert not re.search(r"\bjax(lib)?\.(version|__version)", source)


@pytest.mark.parametrize("file", fnmatch.filter(FILES, "formats/*.py"))
def test_formats_know_no_primitives(file):
    for module in imports(file):
        assert not module.startswith(("jax.extend", "jax.interpreters", "jax.core"))
    for node in ast.walk(parse(file)):
        name = getattr(node, "attr", getattr(node, "id", None))
        assert not (isinstance(name, str) and name.endswith("_p")), name
