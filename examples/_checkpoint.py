"""Checkpoints for the examples that train: an interrupted run resumes."""

import json
import pathlib
from typing import TypeVar

import equinox as eqx


Tree = TypeVar("Tree")


def save(path: pathlib.Path, tree, **configuration) -> None:
    """Write the arrays of a pytree to a file, after a line that describes the run.

    The write is atomic: an interruption leaves the previous file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with open(temporary, "wb") as file:
        file.write(json.dumps(configuration, sort_keys=True).encode() + b"\n")
        eqx.tree_serialise_leaves(file, tree)
    temporary.replace(path)


def restore(path: pathlib.Path, tree: Tree, **configuration) -> Tree:
    """Return the saved tree if it has the same configuration, and otherwise `tree`.

    Both have the same structure.
    """
    if not path.exists():
        return tree
    with open(path, "rb") as file:
        if json.loads(file.readline()) != configuration:
            return tree
        return eqx.tree_deserialise_leaves(file, tree)
