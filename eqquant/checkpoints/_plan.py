"""Match the leaves of a model to the tensors of a checkpoint."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..arrays import is_implicit, QuantizedArray
from ..kernels import Compute
from ..trees import Choice, errors_at, Site
from ._layout import Concatenated, Layout, names_of, shape_of
from ._load import is_array
from ._open import ForeignContents
from .leaves import Contents, is_no_data


CALLER = "load_quantized"
Pattern = str | re.Pattern
AnyContents = Contents | ForeignContents


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tensors and the format of a leaf of the model.

    **Fields:**

    - `site`: the leaf and its path.
    - `layout`: its tensors. `None` keeps the leaf.
    - `choice`: the format to quantize it to, or `None`.
    """

    site: Site
    layout: Layout | None
    choice: Choice | None

    @property
    def compute(self) -> Compute | None:
        return None if self.choice is None else self.choice.compute

    @property
    def size(self) -> int:
        return 0 if self.layout is None else getattr(self.site.leaf, "size", 0)


def plan_leaf(site: Site, contents: AnyContents, names: Callable, choice) -> Plan:
    """Find the tensors of a leaf and check their shapes."""
    leaf, path = site.leaf, site.path
    if is_implicit(leaf):
        raise ValueError(
            f"{CALLER}: at {path}: like must not contain quantized arrays or adapters, "
            f"got {leaf!r}."
        )
    if not is_array(leaf):
        # A number or string may have been saved with the model.
        is_saved = type(contents.described.get(path)) is type(leaf)
        is_saved = is_saved and not is_no_data(leaf)
        layout = Layout.of(_table(path, path), {}) if is_saved else None
        return Plan(site, layout, None)
    given = names(path)
    if given is None:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{CALLER}: at {path}: names returned None, but {leaf} has no values "
                "to keep. Put an array in this place of like."
            )
        return Plan(site, None, None)
    table = _table(given, path)
    shapes = {}
    for entry in table.flat:
        for name in names_of(entry):
            shapes[name] = _shape(name, site, contents)
        _check_shape(entry, shapes, table, site)
    return Plan(site, Layout.of(table, shapes), choice)


def _shape(name: str, site: Site, contents: AnyContents) -> tuple[int, ...]:
    """Return the shape of a tensor, or raise a `ValueError` if there is none."""
    at = f"{CALLER}: at {site.path}"
    if name not in contents.described:
        raise ValueError(
            f"{at}: {contents.path} has no tensor {name!r}." + _similar(name, contents)
        )
    found = contents.described[name]
    if is_implicit(found) and not isinstance(found, QuantizedArray):
        raise ValueError(f"{at}: {name!r} is a {type(found).__name__}: use `load`.")
    if not is_implicit(found) and not is_array(found):
        raise ValueError(f"{at}: expected an array, but {name!r} is {found!r}.")
    return tuple(found.shape)


def _check_shape(entry, shapes, table: np.ndarray, site: Site) -> None:
    """Raise a `ValueError` unless an entry of a table fits the leaf."""
    expected = tuple(site.leaf.shape)
    with errors_at(f"{CALLER}: at {site.path}"):
        found = shape_of(entry, shapes)
        if (*table.shape, *found) != expected:
            stacked = f" before stacking {table.shape} tensors" if table.ndim else ""
            which = " and ".join(map(repr, names_of(entry)))
            raise ValueError(
                f"expected the shape {expected}, but {which} has {found}{stacked}."
            )


def _table(given: Any, path: str) -> np.ndarray:
    """Convert nested lists of names to an array."""
    table = np.array(given, object)
    kinds = {type(entry) for entry in table.flat}
    if kinds not in ({str}, {Concatenated}):
        raise TypeError(
            f"{CALLER}: at {path}: names must return a string, a `Concatenated`, "
            f"nested lists of either with equal lengths, or None; got {given!r}."
        )
    return table


def _similar(name: str, contents: AnyContents) -> str:
    end = name.rsplit(".", 1)[-1]
    names = list(contents.described)
    similar = [other for other in names if other.rsplit(".", 1)[-1] == end]
    similar = (similar or names)[:3]
    return f" It has {', '.join(map(repr, similar))}, ..." if similar else ""


def check_all_used(
    contents: AnyContents, plans: list[Plan], ignore: Sequence[Pattern]
) -> None:
    """Raise a `ValueError` if a tensor is neither used nor ignored."""
    used = {name for p in plans if p.layout is not None for name in p.layout.names}

    def is_ignored(name: str) -> bool:
        return any(
            pattern.fullmatch(name) is not None
            if isinstance(pattern, re.Pattern)
            else fnmatch.fnmatchcase(name, pattern)
            for pattern in ignore
        )

    unused = [n for n in contents.described if n not in used and not is_ignored(n)]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise ValueError(
            f"{CALLER}: the model has no place for {', '.join(map(repr, unused[:5]))}"
            f"{more}. If it does not need them, pass their names in ignore."
        )
