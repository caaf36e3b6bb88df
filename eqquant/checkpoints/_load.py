"""Trees out of files."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import typed
from ..arrays import (
    is_implicit,
    LoraArray,
    RotatedArray,
    StraightThroughArray,
    without_plan,
)
from ..formats import Format
from ..trees import match_layers, Site, sites
from .files import Path, Source, to_jax
from .leaves import Contents, is_no_data, processes_of


_caller = "load"


@typed
def load(path: Path, like: Any = None, *, formats: Sequence[type[Format]] = ()) -> Any:
    """Read what [`eqquant.save`][] wrote, or any other safetensors file.

    All of the header is checked before a tensor is read. Nothing that a file says is
    ever executed. Each tensor that eqquant wrote has a checksum.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import tempfile

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, eqquant.quantize_tree(model, "nf4"))

        arrays = eqquant.load(path)
        assert arrays["layers"]["0"]["weight"].format == eqquant.NF4()

        skeleton = eqx.filter_eval_shape(eqquant.quantize_tree, model, "nf4")
        loaded = eqquant.load(path, like=skeleton)
        assert type(loaded) is eqx.nn.MLP
        ```

    **Arguments:**

    - `path`: a `.safetensors` file; the index of several; or a folder with either.
    - `like`: a pytree of the structure that was saved, of arrays or of
        `jax.ShapeDtypeStruct`s. Where it has a plain array, the file may have a
        quantized one of the same shape and dtype. Arrays that are split over devices
        come back split so, whatever they were when they were saved. If the devices
        are those of several processes, all of them must call this.
    - `formats`: format classes of your own that the file may name.

    **Returns:**

    A pytree of the type of `like`, with the static fields and functions of that.
    Without `like`, nested dictionaries: `layers.0.weight` is in
    `["layers"]["0"]["weight"]`. There arrays of 64 bits are NumPy's as long as
    `jax_enable_x64` is off.

    **Raises:**

    `ValueError` for a file that is damaged, incomplete, of another version, or not what
    `like` describes; nothing is returned then.
    """
    return processes_of(like, _caller).together(lambda: _load(path, like, formats))


def _load(path: Path, like: Any, formats: Sequence[type[Format]]) -> Any:
    with Source(path) as source:
        contents = Contents(source, formats, _caller)
        if like is None:
            read = {path: contents.read(path) for path in contents.described}
            return nested({path: _to_jax_or_numpy(x) for path, x in read.items()})
        leaves = [
            site.leaf if path is None else _read(contents, path, site.leaf)
            for site, path in _match(contents, like)
        ]
    old, treedef = jax.tree.flatten(like, is_leaf=is_implicit)
    out = jax.tree.unflatten(treedef, leaves)
    # Only then: what `eqx.partition` left of a layer keeps its class.
    now_quantized = any(
        is_implicit(x) != is_implicit(y) for x, y in zip(old, leaves, strict=True)
    )
    return match_layers(out) if now_quantized else out


@typed
def load_metadata(path: Path) -> dict[str, str]:
    """The strings that were saved with a checkpoint: `metadata` of [`eqquant.save`][].

    **Arguments:**

    - `path`: as in [`eqquant.load`][].

    **Returns:**

    A dictionary.

    **Raises:**

    `ValueError` as [`eqquant.load`][].
    """
    with Source(os.fspath(path)) as source:
        return source.metadata


def is_array(leaf: Any) -> bool:
    """Whether a leaf of `like` is an array, or described as one."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


#
# Without `like`
#


def _to_jax_or_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return jax.tree.map(to_jax, leaf) if is_implicit(leaf) else leaf
    return leaf if _is_too_wide(leaf) else to_jax(leaf)


def _is_too_wide(array: np.ndarray) -> bool:
    return jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype


def nested(leaves: dict[str, Any]) -> Any:
    """Dictionaries in dictionaries. A name stays whole from where another leaf has its
    beginning: `weight` and `weight.scale` are beside each other."""
    if leaves.keys() == {""}:
        return leaves[""]
    out: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        at, inside = "", out
        for i, name in enumerate(parents):
            at = name if i == 0 else f"{at}.{name}"
            if at in leaves:
                last = ".".join([name, *parents[i + 1 :], last])
                break
            inside = inside.setdefault(name, {})
        inside[last] = leaf
    return out


#
# With it
#


def _match(contents: Contents, like: Any) -> list[tuple[Site, str | None]]:
    """Each leaf of `like`, with the path of what takes its place (None: it stays).
    Everything was compared before."""
    described, where = contents.described, contents.source.path
    plan: list[tuple[Site, str | None]] = []
    for site in sites(like):
        if is_no_data(site.leaf):
            plan.append((site, None))
            continue
        if site.path not in described:
            raise ValueError(f"{_caller}: {where} has nothing at {site.path}.")
        _compare(described[site.path], site, str(where))
        plan.append((site, site.path))
    if left := described.keys() - {path for _, path in plan}:
        raise ValueError(
            f"{_caller}: like has no place for {sorted(left)[:5]}, which {where} has."
        )
    return plan


def _compare(found: Any, site: Site, where: str) -> None:
    """What the file has, with a leaf of `like`."""
    leaf = site.leaf
    if is_implicit(leaf):
        like = jax.tree.structure(without_plan(leaf))
        same = jax.tree.structure(found) == like and all(
            a.shape == b.shape and a.dtype == b.dtype
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(leaf), strict=True)
        )
    elif is_array(leaf):
        arrays = is_implicit(found) or isinstance(found, jax.ShapeDtypeStruct)
        dtype = leaf.dtype
        if isinstance(dtype, np.dtype):
            dtype = dtype.newbyteorder("=")
        same = arrays and found.shape == leaf.shape and found.dtype == dtype
    else:
        same = type(found) is type(leaf)
    if not same:
        raise ValueError(
            f"{_caller}: {where} has {_say(found)} at {site.path}, but like has "
            f"{_say(leaf)}."
        )


def _say(leaf: Any) -> str:
    if is_implicit(leaf):
        of = ""
        if isinstance(leaf, LoraArray):
            of = f" with an adapter of rank {leaf.rank}"
        elif isinstance(leaf, StraightThroughArray):
            of = " to train"
        elif isinstance(leaf, RotatedArray):
            of = f" rotated in blocks of {leaf.block}"
        format = getattr(leaf, "format", None) or "an array"
        return f"{format!r}{of}, {jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
    if is_array(leaf):
        return f"an array {leaf.dtype}{list(leaf.shape)}"
    return repr(leaf)


def _read(contents: Contents, path: str, leaf: Any) -> Any:
    """As JAX or NumPy has it, and where the leaf of `like` is."""
    found = contents.described[path]
    if not is_implicit(found):
        if not is_array(leaf):
            return contents.read(path)
        return _place(contents.read(path, [_sharding(leaf)]), leaf)
    treedef = jax.tree.structure(leaf)
    if jax.tree.structure(found) != jax.tree.structure(without_plan(leaf)):
        return jax.tree.map(to_jax, contents.read(path))
    parts = jax.tree.leaves(leaf)
    read = jax.tree.leaves(contents.read(path, list(map(_sharding, parts))))
    return jax.tree.unflatten(treedef, map(_place, read, parts))


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """That of an array which is split over devices."""
    sharding = getattr(leaf, "sharding", None)
    is_split = sharding is not None and len(sharding.device_set) > 1
    return sharding if is_split else None


def _place(array: Any, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return array.astype(leaf.dtype, copy=False)
    if isinstance(leaf, np.generic):
        return array[()]
    return array if isinstance(array, jax.Array) else to_jax(array)
