"""Read trees from files."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._jax import typed
from ..arrays import is_implicit, quantized_arrays, without_unsaved
from ..formats import Format
from ..trees import match_layers, Site, sites
from ._wrapped import with_wrappers, without_wrappers
from .files import kept, Path, Source, to_jax
from .leaves import Contents, is_no_data, processes_of


_caller = "load"


@typed
def load(path: Path, like: Any = None, *, formats: Sequence[type[Format]] = ()) -> Any:
    """Read a file of [`eqquant.save`][], or any other safetensors file.

    The header is checked before any tensor is read. Loading never executes code from
    the file. Each tensor that eqquant wrote has a checksum.

    On a CPU, large arrays stay in the memory of the mapped file if it aligns them, as
    files of eqquant do. So replace the file, like `save`, rather than changing its
    bytes while the arrays are in use.

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

    - `path`: a `.safetensors` file, the index of several files, or a folder with
        either.
    - `like`: a pytree with the saved structure, of arrays or `jax.ShapeDtypeStruct`s.
        Where it has a plain array, the file may have a quantized array of the same
        shape and dtype. Where it has a weight in low precision
        ([`eqquant.training.low_precision`][]), the file must have a float weight.
        Arrays are split over devices like those in `like`, however they were split when
        they were saved. If the devices belong to several processes, all of them must
        call `load`.
    - `formats`: your own format classes that the file may name.

    **Returns:**

    A pytree of the type of `like`, with its static fields and functions. Without
    `like`, nested dictionaries: `layers.0.weight` is `["layers"]["0"]["weight"]`. If
    `jax_enable_x64` is off, 64-bit arrays in these dictionaries are NumPy arrays.

    **Raises:**

    `ValueError` if the file is damaged, incomplete, of another version, or does not
    match `like`.
    """
    return processes_of(like, _caller).run_in_all(lambda: _load(path, like, formats))


def _load(path: Path, like: Any, formats: Sequence[type[Format]]) -> Any:
    with Source(path) as source:
        contents = Contents(source, formats, _caller)
        if like is None:
            read = {path: contents.read(path) for path in contents.described}
            return nested({path: _to_jax_or_numpy(x) for path, x in read.items()})
        plain = without_wrappers(like)
        leaves = [
            site.leaf if path is None else _read(contents, path, site.leaf)
            for site, path in _match(contents, plain)
        ]
    old, treedef = jax.tree.flatten(plain, is_leaf=is_implicit)
    out = with_wrappers(like, jax.tree.unflatten(treedef, leaves), _caller)
    # Only match layers if a leaf became quantized: otherwise a partial layer of
    # `eqx.partition` would change its class.
    now_quantized = any(
        is_implicit(x) != is_implicit(y) for x, y in zip(old, leaves, strict=True)
    )
    return match_layers(out) if now_quantized else out


@typed
def load_metadata(path: Path) -> dict[str, str]:
    """Read the strings that [`eqquant.save`][] stored as `metadata`.

    !!! Example

        ```python
        import eqquant
        import jax.numpy as jnp
        import tempfile

        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, {"w": jnp.ones((4, 4))}, metadata={"steps": "1000"})
        assert eqquant.checkpoints.load_metadata(path) == {"steps": "1000"}
        ```

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
    """Return whether a leaf of `like` is an array or a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


#
# Without `like`
#


def _to_jax_or_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return jax.tree.map(to_jax, leaf) if is_implicit(leaf) else leaf
    fits = jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
    return to_jax(leaf) if fits else kept(leaf)


def nested(leaves: dict[str, Any]) -> Any:
    """Nest leaves in dictionaries by their paths. If a prefix of a path is itself a
    leaf, the rest of the path stays one key: `weight` and `weight.scale` are siblings.
    """
    if leaves.keys() == {""}:
        return leaves[""]
    out: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        prefix, inside = "", out
        for i, name in enumerate(parents):
            prefix = name if i == 0 else f"{prefix}.{name}"
            if prefix in leaves:
                last = ".".join([name, *parents[i + 1 :], last])
                break
            inside = inside.setdefault(name, {})
        inside[last] = leaf
    return out


#
# With `like`
#


def _match(contents: Contents, like: Any) -> list[tuple[Site, str | None]]:
    """Return each leaf of `like` with the path of its replacement, or `None` to keep
    the leaf. All replacements have been compared with `like`."""
    described, where = contents.described, contents.source.path
    plan: list[tuple[Site, str | None]] = []
    for site in sites(like):
        if is_no_data(site.leaf):
            plan.append((site, None))
            continue
        if site.path not in described:
            raise ValueError(f"{_caller}: {where} has no leaf at {site.path}.")
        _compare(described[site.path], site, str(where))
        plan.append((site, site.path))
    if extra := described.keys() - {path for _, path in plan}:
        raise ValueError(
            f"{_caller}: like has no leaves at {sorted(extra)[:5]}, but {where} does."
        )
    return plan


def _compare(found: Any, site: Site, where: str) -> None:
    """Raise a `ValueError` unless a leaf of the file matches a leaf of `like`."""
    leaf = site.leaf
    if is_implicit(leaf):
        like = jax.tree.structure(without_unsaved(leaf))
        matches = jax.tree.structure(found) == like and all(
            a.shape == b.shape and a.dtype == b.dtype
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(leaf), strict=True)
        )
    elif is_array(leaf):
        arrays = is_implicit(found) or isinstance(found, jax.ShapeDtypeStruct)
        dtype = leaf.dtype
        if isinstance(dtype, np.dtype):
            dtype = dtype.newbyteorder("=")
        matches = arrays and found.shape == leaf.shape and found.dtype == dtype
    else:
        matches = type(found) is type(leaf)
    if not matches:
        raise ValueError(
            f"{_caller}: {where} has {_describe(found)} at {site.path}, but like has "
            f"{_describe(leaf)}."
        )


def _describe(leaf: Any) -> str:
    if is_implicit(leaf):
        formats = {repr(q.format) for q in quantized_arrays(leaf)}
        return " in ".join([repr(leaf), *formats])
    if is_array(leaf):
        return f"an array {leaf.dtype}{list(leaf.shape)}"
    return repr(leaf)


def _read(contents: Contents, path: str, leaf: Any) -> Any:
    """Read a leaf as JAX or NumPy arrays, placed like the leaf of `like`."""
    found = contents.described[path]
    if not is_implicit(found):
        if not is_array(leaf):
            return contents.read(path)
        return _place(contents.read(path, [_sharding(leaf)]), leaf)
    treedef = jax.tree.structure(leaf)
    if jax.tree.structure(found) != jax.tree.structure(without_unsaved(leaf)):
        return jax.tree.map(to_jax, contents.read(path))
    parts = jax.tree.leaves(leaf)
    read = jax.tree.leaves(contents.read(path, list(map(_sharding, parts))))
    return jax.tree.unflatten(treedef, map(_place, read, parts))


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Return the sharding of an array that is split over devices, or `None`."""
    sharding = getattr(leaf, "sharding", None)
    is_split = sharding is not None and len(sharding.device_set) > 1
    return sharding if is_split else None


def _place(array: Any, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return kept(array).astype(leaf.dtype, copy=False)
    if isinstance(leaf, np.generic):
        return array[()]
    return array if isinstance(array, jax.Array) else to_jax(array)
