"""Checkpoints of the examples that train: stop one at any time, and run it again."""

import json
import pathlib
from typing import TypeVar

import equinox as eqx


Tree = TypeVar("Tree")


def save(path: pathlib.Path, tree, **configuration) -> None:
    """Write the arrays of a pytree, below a line of what they belong to. Whoever is
    interrupted here leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with open(temporary, "wb") as file:
        file.write(json.dumps(configuration, sort_keys=True).encode() + b"\n")
        eqx.tree_serialise_leaves(file, tree)
    temporary.replace(path)


def restore(path: pathlib.Path, tree: Tree, **configuration) -> Tree:
    """What was saved, if anything was, and of the same configuration; otherwise `tree`,
    whose structure it has to have."""
    if not path.exists():
        return tree
    with open(path, "rb") as file:
        if json.loads(file.readline()) != configuration:
            return tree
        return eqx.tree_deserialise_leaves(file, tree)
