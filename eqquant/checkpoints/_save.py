"""Write trees to files."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .._jax import typed
from ..trees import errors_at, sites
from ._wrapped import without_wrappers
from .files import check_shard_size, KEY, Path
from .leaves import (
    describe,
    Leaf,
    MAX_SHARD_SIZE,
    processes_of,
    SingleProcess,
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
    """Write a pytree to a safetensors file: a model (quantized or not), the state of an
    optimiser, or any other tree of arrays, numbers, strings and random keys.

    The file is written beside `path`, synced to the disk, and renamed. Even if the
    program is killed, `path` holds either the complete old checkpoint or the complete
    new one.

    If arrays are split over several processes, all processes must call `save` with a
    path on a shared disk. Each process writes the data of its devices to its own
    shards. The first process writes arrays that are not split.

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

    - `path`: a path that ends with `.safetensors`, or a folder. The file in a folder is
        `model.safetensors`.
    - `tree`: any pytree. Functions and static fields of modules are not saved:
        [`eqquant.load`][] takes both from its `like`. A weight in low precision
        ([`eqquant.training.low_precision`][]) is saved as its float weight.
    - `max_shard_size`: the number of bytes above which the checkpoint is split into
        several files with an index, like checkpoints on Hugging Face. `None` always
        writes one file.
    - `metadata`: strings to store in the file, for
        [`eqquant.checkpoints.load_metadata`][].

    **Raises:**

    `TypeError` or `ValueError` with the path of the leaf, if a leaf could not be loaded
    again: its type is not supported, safetensors lacks its dtype, or its format cannot
    be written as text. Nothing is written then.
    """
    check_shard_size(max_shard_size, _caller)
    metadata = check_metadata(metadata, _caller)
    target = target_of(pathlib.Path(os.fspath(path)), _caller)
    processes = processes_of(tree, _caller)
    tree = without_wrappers(tree)
    leaves = processes.run_in_all(lambda: _leaves(tree, processes))
    write_checkpoint(target, leaves, metadata, max_shard_size, processes=processes)


def _leaves(tree: Any, processes: SingleProcess) -> list[Leaf]:
    leaves: list[Leaf] = []
    for site in sites(tree):
        with errors_at(f"{_caller}: at {site.path}"):
            leaf = describe(site.path, site.leaf, processes)
        if leaf is not None:
            leaves.append(leaf)
    check_names(leaves, _caller)
    return leaves


def check_metadata(metadata: Mapping[str, str] | None, caller: str) -> dict[str, str]:
    metadata = dict(metadata or {})
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"{caller}: metadata must map strings to strings, got {key!r}: "
                f"{value!r}."
            )
        if key.startswith(KEY):
            raise ValueError(
                f"{caller}: metadata keys must not start with {KEY!r}: {key!r}."
            )
    return metadata


def check_names(leaves: list[Leaf], caller: str) -> None:
    """Raise a `ValueError` if two leaves would have the same name in the file."""
    used: set[str] = set()
    for leaf in leaves:
        tensors = {name for part in leaf.parts for name in (part.name, part.whole[0])}
        names = {leaf.path, *leaf.records, *tensors}
        if clashes := names & used | names & {"__metadata__"}:
            raise ValueError(
                f"{caller}: {min(clashes)!r} would name two entries of the file. "
                "Rename a key of a dictionary."
            )
        used |= names
        for name in names:
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise ValueError(f"{caller}: {name!r} is not valid text.")
