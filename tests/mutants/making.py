"""Random mutants of cosmic-ray."""

import ast
import difflib
import pathlib
import random
from collections.abc import Iterator
from typing import NamedTuple

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec


class Mutant(NamedTuple):
    about: dict
    source: str  # The whole file.


class _Behaviour(ast.NodeTransformer):
    """Remove annotations.

    Tests check them, but the behaviour for users does not depend on them.
    """

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.generic_visit(node)

    def visit_If(self, node):
        checked_only = "TYPE_CHECKING" in ast.unparse(node.test)
        return node.orelse if checked_only else self.generic_visit(node)


def _behaviour(source: str) -> str:
    return ast.dump(_Behaviour().visit(ast.parse(source)))


def _make(spec: MutationSpec, root: pathlib.Path) -> Mutant | None:
    """Return a mutant; None if it is invalid Python or unchanged.

    For example, `def f(x, /)` without `x` is invalid.
    """
    old = spec.module_path.read_text()
    operator = get_operator(spec.operator_name)(**spec.operator_args)
    new = mutate_code(old, operator, spec.occurrence)
    try:
        if _behaviour(new) == _behaviour(old):
            return None
    except SyntaxError:
        return None
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0))[2:]
    about = {
        "file": spec.module_path.relative_to(root).as_posix(),
        "line": spec.start_pos[0],
        "operator": spec.operator_name.removeprefix("core/"),
        "diff": "\n".join(line.rstrip() for line in diff),
    }
    return Mutant(about, new)


def draw(files: list[pathlib.Path], root: pathlib.Path, seed: int) -> Iterator[Mutant]:
    """Draw mutants in random order, at most one per location.

    Otherwise `+`, which has eleven mutants, would outweigh `True`, which has one.
    """
    database = WorkDB(":memory:", WorkDB.Mode.create)
    init(files, database, {})
    places = {}
    for item in database.work_items:
        (spec,) = item.mutations
        place = str(spec.module_path), spec.start_pos, spec.end_pos
        places.setdefault(place, []).append(spec)
    generator = random.Random(seed)
    for place in generator.sample(sorted(places), len(places)):
        specs = sorted(places[place], key=lambda s: (s.operator_name, s.occurrence))
        made = (_make(spec, root) for spec in generator.sample(specs, len(specs)))
        if mutant := next(filter(None, made), None):
            yield mutant
