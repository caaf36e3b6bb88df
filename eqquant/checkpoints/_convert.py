"""Quantize a checkpoint on disk, without a model."""

import functools as ft
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import typed, warn
from ..arrays import is_implicit
from ..formats import Format
from ..trees import (
    Choice,
    choose,
    errors_at,
    Site,
    sites,
    weight_of,
    WeightAxes,
    with_progress,
)
from ._convert_gguf import as_described, GGUF, write_metadata, write_quantized
from ._describe import describe_checkpoint, Description
from ._load import nested
from ._open import ForeignContents, open_contents
from ._pieces import quantize_in_pieces
from ._save import check_names
from .files import (
    check_shard_size,
    copy_others,
    index_of,
    KEY,
    Path,
    read_manifest,
    release,
    Shard,
    TensorFile,
    to_json,
    VERSION,
    with_abstract_arrays,
)
from .foreign import is_gguf
from .leaves import (
    Contents,
    describe,
    describe_later,
    format_to_json,
    Leaf,
    MAX_SHARD_SIZE,
    SingleProcess,
    target_of,
    write_checkpoint,
)


_caller = "quantize_checkpoint"
# 8-bit floats are excluded because they need the scales in other tensors.
_floats = ("float16", "bfloat16", "float32", "float64")


@typed
def quantize_checkpoint(
    src: Path,
    dst: Path,
    format: Format | str | None = "nf4",
    *,
    rules: Mapping | None = None,
    min_size: int = 256,
    max_shard_size: int | None = MAX_SHARD_SIZE,
    check_finite: bool = True,
    progress: bool | None = None,
) -> None:
    """Quantize the weights of a checkpoint on disk, without a model.

    By default, weights are float tensors with two axes whose names end in `weight`,
    like linear layers and embeddings of PyTorch, and `kernel`, `w` and `embedding` of
    Flax and Haiku. All other tensors are copied.

    Tensors are read, quantized and written one at a time. If the call is interrupted,
    repeat it to continue after the last finished shard. (A GGUF file is not split, but
    its tensors wait in hidden shards until it is complete.)

    !!! Example

        ```python
        import eqquant
        import jax
        import tempfile

        folder = tempfile.mkdtemp()
        weight = jax.random.normal(jax.random.key(0), (64, 256))
        eqquant.save(f"{folder}/float.safetensors", {"head": {"weight": weight}})
        eqquant.checkpoints.quantize_checkpoint(
            f"{folder}/float.safetensors", f"{folder}/small"
        )
        quantized = eqquant.load(f"{folder}/small")["head"]["weight"]
        assert quantized.format == eqquant.NF4()
        ```

    **Arguments:**

    - `src`: as `path` in [`eqquant.load`][], or a file of another library. If that
        library quantized it, a warning names the formats, and the weights are decoded
        and quantized again.
    - `dst`: as `path` in [`eqquant.save`][]. If `src` is a folder, its configuration
        and tokenizer are also copied. If `src` is a GGUF file, `dst` may also be one.
        Then metadata, tokenizer and all tensors without a format are copied, and the
        formats must be formats of [`eqquant.checkpoints.write_gguf`][]. Otherwise a
        file that ends in `.metadata.gguf` beside `dst` contains metadata and tokenizer,
        and can be the `source` of `write_gguf`.
    - `format`, `rules`, `min_size`, `check_finite`, `progress`: as in
        [`eqquant.quantize_tree`][]. Rules match the names of tensors.
    - `max_shard_size`: as in [`eqquant.save`][].

    [`eqquant.load`][] and [`eqquant.load_quantized`][] read the result.

    **Raises:**

    The errors of [`eqquant.load`][] and [`eqquant.quantize_tree`][], and `ValueError`
    if eqquant already quantized `src`, or if `src` equals `dst`.
    """
    source_path, path = (pathlib.Path(os.fspath(x)) for x in (src, dst))
    to_gguf = path.suffix == GGUF
    if to_gguf and not is_gguf(source_path):
        raise ValueError(
            f"{_caller}: src must be a GGUF file if dst is one, because its metadata "
            f"and its tokenizer are copied; got {src}. Write a folder instead."
        )
    target = path if to_gguf else target_of(path, _caller)
    check_shard_size(max_shard_size, _caller)
    src_description = describe_checkpoint(source_path)
    _check_apart(src_description, target)
    with open_contents(source_path, (), _caller, decode="all") as contents:
        if isinstance(contents, ForeignContents) and src_description.formats:
            warn(
                f"{_caller}: {source_path} is already quantized, in "
                f"{', '.join(src_description.formats)}. The weights are decoded and "
                "quantized again.",
                UserWarning,
            )
        for name, found in contents.described.items():
            if is_implicit(found):
                raise ValueError(
                    f"{_caller}: src is already quantized: {name} in {src}."
                )
        choices = _choose(contents, format, rules, min_size)
        make = ft.partial(_quantized, contents, choices, check_finite)
        target.parent.mkdir(parents=True, exist_ok=True)
        elements = sum(contents.described[name].size for name in choices)
        show = lambda shown: with_progress(shown, elements, progress, caller=_caller)
        task = _task(src_description, choices, max_shard_size)
        if to_gguf:
            write_quantized(
                source_path, target, choices, make, max_shard_size, task, show, _caller
            )
            return
        leaves = [
            _leaf(name, contents, choices.get(name), make)
            for name in contents.described
        ]
        check_names(leaves, _caller)
        if src_description.kind == "GGUF":
            write_metadata(source_path, target.with_suffix(f".metadata{GGUF}"), _caller)
        if source_path.is_dir():
            copy_others(source_path, target.parent)
        write_checkpoint(
            target,
            leaves,
            _strings(src_description.metadata),
            max_shard_size,
            saved=task,
            is_done=_is_done,
            show=show,
        )


def _check_apart(source: Description, target: pathlib.Path) -> None:
    ours = {target.resolve(), index_of(target).resolve()}
    if ours & {path.resolve() for path in (source.path, *source.files)}:
        raise ValueError(
            f"{_caller}: src and dst must be different, got {target} for both."
        )


def _strings(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the metadata that safetensors can store: no arrays, such as the tokens of
    a GGUF file."""
    scalars = {k: v for k, v in metadata.items() if isinstance(v, str | int | float)}
    return {k: str(v) for k, v in scalars.items() if not k.startswith(KEY)}


def _choose(
    contents: Contents | ForeignContents,
    format: Any,
    rules: Mapping | None,
    min_size: int,
) -> dict[str, Choice]:
    tree = nested(contents.described)
    if unknown := {site.path for site in sites(tree)} ^ contents.described.keys():
        raise ValueError(f"{_caller}: {min(unknown)!r} cannot name a tensor.")

    options = {"where": None, "rules": rules, "min_size": min_size}
    choices = with_abstract_arrays(
        lambda tree: choose(
            tree, format, weight_of=_weight_of, caller=_caller, **options
        ),
        tree,
    )
    if not choices and format is not None:
        warn(
            f"{_caller}: found no weights to quantize. Select tensors with rules.",
            UserWarning,
        )
    return {choice.path: choice for choice in choices}


def _weight_of(site: Site) -> WeightAxes | str:
    """Like `weight_of`, but a matrix of PyTorch is also a weight."""
    if site.leaf.dtype.name not in _floats:
        return "not floats of 16 bits or more"
    is_torch = site.leaf.ndim == 2 and site.path.rsplit(".", 1)[-1] == "weight"
    found = weight_of(site)
    return WeightAxes(-1) if is_torch and isinstance(found, str) else found


def _leaf(
    name: str,
    contents: Contents | ForeignContents,
    choice: Choice | None,
    make: Callable[[str], Any],
) -> Leaf:
    found = contents.described[name]
    if not isinstance(found, jax.ShapeDtypeStruct):
        leaf = describe(name, found, SingleProcess())
        assert leaf is not None
        return leaf
    if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{_caller}: {name} is a random key: use `load` and `save`.")
    read = lambda: contents.read_array(name, found.dtype)
    if choice is None:
        return describe_later(name, found, read)
    return describe_later(name, as_described(choice, found), ft.partial(make, name))


def _quantized(
    contents: Contents | ForeignContents,
    choices: dict[str, Choice],
    check_finite: bool,
    name: str,
) -> Any:
    """Read and quantize a tensor."""
    choice = choices[name]
    array = contents.read_array(name, contents.described[name].dtype)
    with errors_at(f"{_caller}: at {name}"):
        q = quantize_in_pieces(
            array, choice.format, choice.axis, check_finite=check_finite
        )
    release(array)
    return q


#
# Continuing an interrupted call
#


def _task(
    source: Description, choices: dict[str, Choice], max_shard_size: int | None
) -> str:
    """Return a token of 16 letters for the work of a call. Finished shards are reused
    if they have the same token."""
    digest = hashlib.sha256()
    for path, size in source.files.items():
        digest.update(f"{size} {path.stat().st_mtime_ns} ".encode())
    digest.update(f"{source.tensors} {source.metadata}".encode())
    chosen = {
        name: [format_to_json(choice.format), choice.axis]
        for name, choice in choices.items()
    }
    digest.update(to_json([VERSION, max_shard_size, chosen]))
    return digest.hexdigest()[:16]


def _is_done(path: pathlib.Path, shard: Shard, leaves: Sequence[Leaf]) -> bool:
    """Return whether a shard is finished. Shards are renamed only when they are
    complete."""
    if not path.exists():
        return False
    try:
        with TensorFile(path) as file:
            manifest = read_manifest(file)
            stored = {(t.name, t.dtype, t.shape) for t in file.tensors.values()}
    except ValueError:
        return False
    planned = {(p.name, p.dtype, p.shape) for leaf in leaves for p in leaf.parts}
    return manifest is not None and manifest.shard == shard and stored == planned
