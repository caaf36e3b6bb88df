"""The folders of the package and what they may import, as CONTRIBUTING.md says."""

import ast
import inspect
import pathlib
import re
from graphlib import CycleError, TopologicalSorter

import pytest
from public import public_names


ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "eqquant"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
FOLDERS = sorted({file.rpartition("/")[0] for file in FILES} - {""})


def read_rooms() -> list[str]:
    """From the ground up."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"test_architecture.*?```text\n(.*?)```", text, re.DOTALL)
    return [line.split("/")[0] for line in block.splitlines()][::-1]


ROOMS = read_rooms()


def room_of(file: str) -> str | None:
    """None for the public names, which are above all rooms."""
    return file.split("/")[0] if "/" in file else None


def parse(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(), file)


def file_of(module: str) -> str | None:
    path = module.removeprefix("eqquant").removeprefix(".").replace(".", "/")
    names = f"{path}.py", f"{path}/__init__.py".lstrip("/")
    return next((name for name in names if name in FILES), None)


def imports(file: str) -> set[str]:
    """The absolute name of each module that a file imports: anywhere, for type checkers
    alone as well.

    Of `from a import b` both `a` and `a.b`, which may or may not be a module.
    """
    package = ["eqquant", *file.split("/")[:-1]]
    found = set()
    for node in ast.walk(parse(file)):
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


def rooms_below(file: str) -> set[str]:
    """The other rooms that a file imports from."""
    rooms = {room_of(other) or "eqquant" for other in imported_files(file)}
    return rooms - {room_of(file)}


def test_every_room_is_in_the_list():
    assert sorted(ROOMS) == sorted({room_of(file) for file in FILES} - {None})


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file)])
def test_imports_go_down_and_through_the_door(file):
    above = set(ROOMS[ROOMS.index(room_of(file)) :]) | {"eqquant"}
    assert not rooms_below(file) & above
    for other in imported_files(file):
        if room_of(other) != room_of(file):
            door = re.fullmatch(r"\w+/([a-z]\w*/)?__init__\.py", other)
            assert door, f"{file} imports {other}, which is private to its room"


def test_no_circle_of_files():
    try:
        TopologicalSorter({file: imported_files(file) for file in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rooms_within_checkpoints():
    """What is called is at the top; each of the others imports only these of them, and
    through the door."""
    below = {"leaves": {"files"}, "foreign": {"files"}, "files": set()}
    below[""] = below.keys()
    for file in (file for file in FILES if room_of(file) == "checkpoints"):
        mine = file.split("/")[1:-1]
        for other in imported_files(file):
            theirs, door = other.split("/")[1:-1], other.endswith("/__init__.py")
            if room_of(other) == "checkpoints" and theirs != mine:
                assert door and "".join(theirs) in below["".join(mine)], file


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_imports(room):
    doc = ast.get_docstring(parse(f"{room}/__init__.py"))
    assert "Exports" in doc
    said = re.search(r"\bImports\s+(.*?)\.(\s|$)", doc, re.DOTALL)
    actual = set().union(*(rooms_below(f) for f in FILES if room_of(f) == room))
    assert set(re.findall(r"`(\w+)`", said[1])) == actual


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_is_for(folder):
    assert f"{folder}/__init__.py" in FILES
    assert ast.get_docstring(parse(f"{folder}/__init__.py"))


def test_tests_are_in_the_same_rooms():
    tests = ROOT / "tests"
    folders = {p.parent.relative_to(tests).as_posix() for p in tests.rglob("test_*.py")}
    assert folders - {"."} <= {*FOLDERS, "examples", "clients", "imports"}


def test_the_imports_are_found():
    # The tests above would pass if no import were ever found.
    assert "kernels/__init__.py" in imported_files("primitives/_lowering.py")
    assert "formats/_format.py" in imported_files("formats/_int8.py")
    assert "dispatch/rules/_registry.py" in imported_files("dispatch/rules/__init__.py")
    assert "arrays/_plain.py" in imported_files("arrays/lora/_structure.py")
    assert imported_files("__init__.py")


@pytest.mark.parametrize("file", [file for file in FILES if file != "_jax/_compat.py"])
def test_only_compat_depends_on_the_version_of_jax(file):
    source = (PACKAGE / file).read_text()
    assert not re.search(r"\bjax\b.*\b_src\b", source)
    assert not re.search(r"\bjax(lib)?\.(version|__version)", source)


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file) == "formats"])
def test_formats_know_no_primitives(file):
    for module in imports(file):
        assert not module.startswith(("jax.extend", "jax.interpreters", "jax.core"))
    for node in ast.walk(parse(file)):
        name = getattr(node, "attr", getattr(node, "id", None))
        assert not (isinstance(name, str) and name.endswith("_p")), name


FUNCTIONS = {
    path: inspect.unwrap(value)
    for path, value in public_names().items()
    if callable(value) and not inspect.isclass(value)
}


# Under test, jaxtyping's import hook checks every function, so that no other test
# notices a missing decorator. `is_quantized` accepts any object.
@pytest.mark.parametrize("path", sorted(FUNCTIONS.keys() - {"eqquant.is_quantized"}))
def test_public_functions_check_their_arguments(path):
    (written,) = ast.parse(inspect.getsource(FUNCTIONS[path])).body
    assert isinstance(written, ast.FunctionDef)
    assert "typed" in map(ast.unparse, written.decorator_list)


# Guides that are longer than the limit, until they are split.
LONG_GUIDES = {
    "calibration.md",
    "checkpoints.md",
    "sharding.md",
    "training.md",
}


def guides() -> dict[str, int]:
    """Map each guide, which is a page directly in docs/, to its number of words."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return {page.name: len(page.read_text().split()) for page in pages}


def test_guides_are_short():
    long = {name: words for name, words in guides().items() if words > 1500}
    assert not long.keys() - LONG_GUIDES, long
