"""Trees into files."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .._jax import typed
from ..trees import sites
from ._errors import with_place
from .files import KEY, Path
from .leaves import (
    Alone,
    describe,
    Leaf,
    MAX_SHARD_SIZE,
    processes_of,
    target_of,
    write_checkpoint,
)


_caller = "save"


@typed
def save(
    path: Path,
    tree: Any,
    *,
    max_shard_size: int | None = MAX_SHARD_SIZE,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a pytree to a safetensors file: a model, quantized or not, the state of an
    optimiser, or anything else that is made of arrays, numbers, strings and random
    keys.

    The file is written beside its place, synced to the disk, and renamed. Whatever
    stops the program, `path` is either the old checkpoint or the new one, whole.

    If arrays are split over several processes, all of them must call this, with a path
    on a disk that they share. Each writes what its devices have, into shards of its
    own. What is not split is written by the first process.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import tempfile

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.quantize_tree(model, "nf4")
        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, model)
        assert eqx.tree_equal(eqquant.load(path, like=model), model)
        ```

    **Arguments:**

    - `path`: ends with `.safetensors`; or is a folder, which holds
        `model.safetensors` then.
    - `tree`: any pytree. Functions in it are not saved, as they are code, and neither
        are static fields of modules: [`eqquant.load`][] takes both from its `like`.
    - `max_shard_size`: above so many bytes the checkpoint is split into several files,
        with an index beside them, as those of Hugging Face; `None` for one file in any
        case.
    - `metadata`: strings to keep in the file: see
    [`eqquant.checkpoints.load_metadata`][].

    **Raises:**

    `TypeError` or `ValueError`, naming the path, for a leaf that could not be loaded
    again: of another type, of a dtype that safetensors does not have, or of a format
    that cannot be written as text. Nothing is written then.
    """
    check_shard_size(max_shard_size, _caller)
    metadata = check_metadata(metadata, _caller)
    target = target_of(pathlib.Path(os.fspath(path)), _caller)
    processes = processes_of(tree, _caller)
    leaves = processes.together(lambda: _leaves(tree, processes))
    write_checkpoint(target, leaves, metadata, max_shard_size, processes=processes)


def _leaves(tree: Any, processes: Alone) -> list[Leaf]:
    leaves: list[Leaf] = []
    for site in sites(tree):
        try:
            leaf = describe(site.path, site.leaf, processes)
        except (TypeError, ValueError) as error:
            raise with_place(error, f"{_caller}: at {site.path}") from error
        if leaf is not None:
            leaves.append(leaf)
    check_names(leaves, _caller)
    return leaves


def check_shard_size(size: int | None, caller: str) -> None:
    if size is not None and size < 1:
        raise ValueError(
            f"{caller}: max_shard_size must be positive or None, got {size}."
        )


def check_metadata(metadata: Mapping[str, str] | None, caller: str) -> dict[str, str]:
    metadata = dict(metadata or {})
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"{caller}: metadata must hold strings, got {key}: {value}."
            )
        if key.startswith(KEY):
            raise ValueError(f"{caller}: metadata must not use {key!r}.")
    return metadata


def check_names(leaves: list[Leaf], caller: str) -> None:
    """An error if two leaves would go by the same name."""
    seen: set[str] = set()
    for leaf in leaves:
        tensors = {name for part in leaf.parts for name in (part.name, part.whole[0])}
        names = {leaf.path, *leaf.records, *tensors}
        if twice := names & seen | names & {"__metadata__"}:
            raise ValueError(
                f"{caller}: {min(twice)!r} would be the name of two things. Rename a "
                "key of a dictionary."
            )
        seen |= names
        for name in names:
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise ValueError(f"{caller}: {name!r} is not valid text.")
