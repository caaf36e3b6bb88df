"""The `PartitionSpec` of each leaf of a tree, and its checks."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._jax import parts_of
from ..arrays import is_implicit, quantized_arrays
from ..partition import names_of
from ..trees import Rules, Site, sites


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def specs_of(
    tree: Any, specs: Any, rules: Mapping | None, caller: str
) -> Iterator[tuple[Site, PartitionSpec]]:
    """Yield the leaves of a tree in order, with their specs."""
    if specs is not None and rules is not None:
        raise ValueError(f"{caller}: give specs or rules, not both.")
    if rules is None:
        return zip(sites(tree), _by_prefix(tree, specs, caller), strict=True)
    return _by_rules(tree, rules, caller)


def _by_prefix(tree: Any, specs: Any, caller: str) -> list[PartitionSpec]:
    def below(spec, subtree):
        if not _is_spec(spec):
            raise TypeError(
                f"{caller}: specs must have a PartitionSpec, or None, for each array, "
                f"got {spec!r}."
            )
        spec = PartitionSpec() if spec is None else spec
        return jax.tree.map(lambda _: spec, subtree, is_leaf=is_implicit)

    try:
        full = jax.tree.map(below, specs, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            f"{caller}: specs must be a prefix of the tree, such as the specs of the "
            f"model before it was quantized.{_are_rules(specs)} {error}"
        ) from None
    return jax.tree.leaves(full, is_leaf=_is_spec)


def _are_rules(specs: Any) -> str:
    """Return advice if specs seem to be rules."""
    is_like_rules = isinstance(specs, Mapping) and all(map(_is_spec, specs.values()))
    return f" Did you mean `rules={specs}`?" if is_like_rules else ""


def _by_rules(
    tree: Any, mapping: Mapping, caller: str
) -> Iterator[tuple[Site, PartitionSpec]]:
    def parse(spec: Any) -> tuple[Any, Any]:
        if not _is_spec(spec):
            raise TypeError(f"it must be a PartitionSpec or None, got {spec!r}.")
        return None, PartitionSpec() if spec is None else spec

    rules = Rules(mapping, parse, caller)
    for site in sites(tree):
        rule: Any = rules.find(site)
        yield site, PartitionSpec() if rule is None else rule[1]
    rules.warn_of_unused()


def check_spec(
    path: str, leaf: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh, caller: str
) -> None:
    """Raise an error if a spec does not fit. It names the axis, the mesh axes, and the
    numbers of parts that fit."""
    where = f"{caller}: {path or 'the array'} of shape {tuple(leaf.shape)}"
    entries = [names_of(entry) for entry in spec]
    names = [name for entry in entries for name in entry]
    if unknown := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(
            f"{where}: {spec} names {unknown[0]!r}, but the mesh has the axes "
            f"{mesh.axis_names}."
        )
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{where}: {spec} uses {repeated[0]!r} twice.")
    if len(entries) > leaf.ndim:
        raise ValueError(
            f"{where}: {spec} is for {len(entries)} axes. Give each array its own "
            "spec, or use `rules`."
        )
    for axis, entry in enumerate(entries):
        parts = parts_of(mesh, entry)
        if _fits(leaf, axis, parts):
            continue
        over = " and ".join(map(repr, entry))
        fit = [n for n in range(1, 2 * mesh.size + 1) if _fits(leaf, axis, n)]
        fit = f"it can be in {', '.join(map(str, fit))} parts." if fit[1:] else ""
        raise ValueError(
            f"{where}: axis {axis} cannot be split in {parts} equal parts, over "
            f"{over} of the mesh{_unit(leaf, axis)}; "
            + (fit or "it can only be whole.")
        )


def _fits(leaf: Any, axis: int, parts: int) -> bool:
    if parts == 1:
        return True
    spec = PartitionSpec(*[None] * axis, "parts")
    mesh = AbstractMesh((parts,), ("parts",))
    specs = leaf.split_specs(spec, mesh) if is_implicit(leaf) else spec
    if specs is NotImplemented:
        return False

    def even(part, spec):
        return all(
            size % parts_of(mesh, entry) == 0
            for size, entry in zip(part.shape, spec, strict=False)
        )

    return all(jax.tree.leaves(jax.tree.map(even, leaf, specs)))


def _unit(leaf: Any, axis: int) -> str:
    """Return the reason why an axis can only be split at some positions."""
    if not is_implicit(leaf) or axis not in leaf.blocked_axes:
        return ""
    sizes = [q.format.block_size or q.format.group for q in quantized_arrays(leaf)]
    return f", between blocks of {sizes[0]}" if sizes else ""
