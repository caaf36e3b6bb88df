"""The rules about folders and imports in CONTRIBUTING.md."""

import ast
import inspect
import pathlib
import re
import tokenize
from graphlib import CycleError, TopologicalSorter
from token import STRING

import pytest
from public import public_names


ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "eqquant"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
FOLDERS = sorted({file.rpartition("/")[0] for file in FILES} - {""})


def read_layers() -> list[str]:
    """Return the folders of the package, from the bottom to the top."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"test_architecture.*?```text\n(.*?)```", text, re.DOTALL)
    return [line.split("/")[0] for line in block.splitlines()][::-1]


LAYERS = read_layers()


def folder_of(file: str) -> str | None:
    """Return the folder of a file; None for files with public names, above all
    folders."""
    return file.split("/")[0] if "/" in file else None


def parse(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(), file)


def file_of(module: str) -> str | None:
    path = module.removeprefix("eqquant").removeprefix(".").replace(".", "/")
    names = f"{path}.py", f"{path}/__init__.py".lstrip("/")
    return next((name for name in names if name in FILES), None)


def imports(file: str) -> set[str]:
    """Return the absolute name of each module that a file imports.

    This includes imports inside of functions and for type checkers. `from a import b`
    adds both `a` and `a.b`, which may or may not be a module.
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
            # `from . import a` imports the module `a`, not the package.
            only_modules = node.module is None and all(map(file_of, members))
            found |= members if only_modules else {origin, *members}
    return found


def imported_files(file: str) -> set[str]:
    ours = {m for m in imports(file) if m == "eqquant" or m.startswith("eqquant.")}
    return set(filter(None, map(file_of, ours)))


def folders_below(file: str) -> set[str]:
    """Return the other folders that a file imports from."""
    folders = {folder_of(other) or "eqquant" for other in imported_files(file)}
    return folders - {folder_of(file)}


def test_every_folder_is_listed():
    assert sorted(LAYERS) == sorted({folder_of(file) for file in FILES} - {None})


@pytest.mark.parametrize("file", [file for file in FILES if folder_of(file)])
def test_imports_point_down_and_use_exports(file):
    above = set(LAYERS[LAYERS.index(folder_of(file)) :]) | {"eqquant"}
    assert not folders_below(file) & above
    for other in imported_files(file):
        if folder_of(other) != folder_of(file):
            is_init = re.fullmatch(r"\w+/([a-z]\w*/)?__init__\.py", other)
            assert is_init, f"{file} imports {other}, which is private to its folder"


def test_no_import_cycles():
    try:
        TopologicalSorter({file: imported_files(file) for file in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_subfolders_of_checkpoints():
    """Each subfolder of checkpoints imports only its allowed subfolders, through their
    `__init__.py`."""
    below = {"leaves": {"files"}, "foreign": {"files"}, "files": set()}
    below["writers"] = below.keys() - {"writers"}
    below[""] = below.keys()
    for file in (file for file in FILES if folder_of(file) == "checkpoints"):
        mine = file.split("/")[1:-1]
        for other in imported_files(file):
            theirs, is_init = other.split("/")[1:-1], other.endswith("/__init__.py")
            if folder_of(other) == "checkpoints" and theirs != mine:
                assert is_init and "".join(theirs) in below["".join(mine)], file


@pytest.mark.parametrize("folder", LAYERS)
def test_docstrings_list_imported_folders(folder):
    doc = ast.get_docstring(parse(f"{folder}/__init__.py"))
    assert "Exports" in doc
    listed = re.search(r"\bImports\s+(.*?)\.(\s|$)", doc, re.DOTALL)
    actual = set().union(*(folders_below(f) for f in FILES if folder_of(f) == folder))
    assert set(re.findall(r"`(\w+)`", listed[1])) == actual


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_a_docstring(folder):
    assert f"{folder}/__init__.py" in FILES
    assert ast.get_docstring(parse(f"{folder}/__init__.py"))


def test_tests_are_in_matching_folders():
    tests = ROOT / "tests"
    folders = {p.parent.relative_to(tests).as_posix() for p in tests.rglob("test_*.py")}
    assert folders - {"."} <= {*FOLDERS, "examples", "clients", "imports"}


def test_imports_are_found():
    # Otherwise the tests above would pass if no import was ever found.
    assert "kernels/__init__.py" in imported_files("primitives/_lowering.py")
    assert "formats/_fitted.py" in imported_files("formats/_int8.py")
    assert "dispatch/rules/_registry.py" in imported_files("dispatch/rules/__init__.py")
    assert "arrays/_plain.py" in imported_files("arrays/lora/_structure.py")
    assert imported_files("__init__.py")


@pytest.mark.parametrize("file", [file for file in FILES if file != "_jax/_compat.py"])
def test_only_compat_depends_on_the_version_of_jax(file):
    source = (PACKAGE / file).read_text()
    assert not re.search(r"\bjax\b.*\b_src\b", source)
    assert not re.search(r"\bjax(lib)?\.(version|__version)", source)


@pytest.mark.parametrize(
    "file", [file for file in FILES if folder_of(file) == "formats"]
)
def test_formats_use_no_primitives(file):
    for module in imports(file):
        assert not module.startswith(("jax.extend", "jax.interpreters", "jax.core"))
    for node in ast.walk(parse(file)):
        name = getattr(node, "attr", getattr(node, "id", None))
        assert not (isinstance(name, str) and name.endswith("_p")), name


# The hooks of arrays, and the rule of the primitive of JAX.
USES_MESHES = {
    "arrays/_boundary.py",
    "arrays/_partition.py",
    "dispatch/control/_shard_map.py",
}
MESHES = r"plan|mesh|partition_?spec|(spec|names|parts)_of|manual_axes|\bshard_map"


@pytest.mark.parametrize(
    "file", [file for file in FILES if folder_of(file) in ("arrays", "dispatch")]
)
def test_arrays_and_rules_do_not_mention_meshes(file):
    """Docstrings and texts of errors may mention them."""
    with (PACKAGE / file).open("rb") as source:
        tokens = [t for t in tokenize.tokenize(source.readline) if t.type != STRING]
    found = {t.string for t in tokens if re.search(MESHES, t.string, re.IGNORECASE)}
    assert bool(found) == (file in USES_MESHES), found


FUNCTIONS = {
    path: inspect.unwrap(value)
    for path, value in public_names().items()
    if callable(value) and not inspect.isclass(value)
}


# In slow tests, jaxtyping's import hook checks every function, so that no other test
# notices a missing decorator. `is_quantized` accepts any object.
@pytest.mark.parametrize("path", sorted(FUNCTIONS.keys() - {"eqquant.is_quantized"}))
def test_public_functions_check_their_arguments(path):
    (written,) = ast.parse(inspect.getsource(FUNCTIONS[path])).body
    assert isinstance(written, ast.FunctionDef)
    assert "typed" in map(ast.unparse, written.decorator_list)


def guides() -> dict[str, int]:
    """Map each guide, which is a page directly in docs/, to its number of words."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return {page.name: len(page.read_text().split()) for page in pages}


def test_guides_are_short():
    long = {name: words for name, words in guides().items() if words > 1500}
    assert not long


def lines_of_code(function: ast.FunctionDef, source: list[str]) -> int:
    """Count the lines of a function without docstrings, comments and empty lines."""
    lines = set(range(function.lineno, function.end_lineno + 1))
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    code = (source[line - 1].strip() for line in lines)
    return sum(bool(line) and not line.startswith("#") for line in code)


@pytest.mark.parametrize("file", FILES)
def test_functions_are_short(file):
    source = (PACKAGE / file).read_text().splitlines()
    functions = (n for n in ast.walk(parse(file)) if isinstance(n, ast.FunctionDef))
    lengths = {f.name: lines_of_code(f, source) for f in functions}
    assert not {name: n for name, n in lengths.items() if n > 80}
