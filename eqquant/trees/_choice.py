"""The choice of weights in a pytree, with their formats and axes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..arrays import is_implicit, is_quantized, LoraArray
from ..formats import as_format, Format
from ..kernels import Compute
from ._choice_warnings import warn_of_larger, warn_of_quantized
from ._conventions import Axis, WeightAxes
from ._errors import errors_at
from ._layers import match_layers
from ._roles import weight_of
from ._rules import format_rule, Rules
from ._sites import Site, sites
from ._size import too_small


@dataclasses.dataclass(frozen=True)
class Choice:
    """A weight that was chosen.

    **Fields:**

    - `index`: its position among the leaves of the model.
    - `path`: its path.
    - `what`: its format, or the value of another kind of rule.
    - `axis`: the axis along which it is quantized.
    - `out`, `is_table`: the output axis of its layer, and whether the layer looks up
        rows, as in [`WeightAxes`][].
    - `compute`: the settings of its products, if a rule specifies them.
    """

    index: int
    path: str
    what: Any
    axis: Axis
    out: int | None = None
    is_table: bool = False
    compute: Compute | None = None

    @property
    def format(self) -> Format:
        return self.what


def choose(
    model: Any,
    format: Format | str | None,
    *,
    where: Any,
    rules: Mapping | None,
    min_size: int,
    caller: str,
    weight_of: Callable[[Site], WeightAxes | str] = weight_of,
    may_be_quantized: bool = False,
) -> list[Choice]:
    """Return the weights that [`eqquant.quantize_tree`][] quantizes.

    `weight_of` returns the axes of a weight, or the reason why an array is not one.
    Errors start with the name `caller`. Unless some weights may be quantized already, a
    warning names them.
    """

    def is_candidate(leaf):
        leaf = base_of(leaf)
        is_array = eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
        return is_array or is_quantized(leaf)

    def is_worth_it(site: Site, kind: WeightAxes, format: Format) -> bool:
        return not too_small(site.leaf, format, kind.axis, min_size)

    choices = choose_among(
        is_candidate,
        model,
        None if format is None else as_format(format, caller),
        is_worth_it=is_worth_it,
        where=where,
        rules=Rules(rules, format_rule, caller),
        weight_of=weight_of,
        caller=caller,
    )
    leaves = [base_of(leaf) for leaf in leaves_of(model)]
    quantized = [c for c in choices if is_quantized(leaves[c.index])]
    choices = [c for c in choices if not is_quantized(leaves[c.index])]
    if not may_be_quantized:
        warn_of_quantized(quantized, leaves, caller)
    warn_of_larger(choices, leaves, caller)
    return choices


def choose_among(
    is_candidate: Callable[[Any], bool],
    model: Any,
    what: Any,
    *,
    is_worth_it: Callable[[Site, WeightAxes, Any], bool],
    where: Any,
    rules: Rules,
    weight_of: Callable[[Site], WeightAxes | str] = weight_of,
    caller: str,
) -> list[Choice]:
    """Choose among the candidates.

    A rule that matches a leaf decides about it. All other leaves are chosen for `what`
    if `where` selects them. Without `where` these are the weights of known layers that
    are worth it. If `what` is None, only rules choose.
    """
    mask = None if where is None else _filter_mask(where, model, caller)
    if mask is not None and len(mask) != len(leaves_of(model)):
        raise ValueError(f"{caller}: where must be a pytree prefix of model.")

    choices: list[Choice] = []
    for i, site in enumerate(sites(model)):
        if not is_candidate(site.leaf):
            continue
        kind = weight_of(site)
        is_known = isinstance(kind, WeightAxes)
        axes = kind if is_known else WeightAxes(-1)
        axis, out, compute = axes.axis, axes.out, None
        if (rule := rules.find(site)) is not None:
            chosen, rule_axis, compute = rule
            if rule_axis is not None and rule_axis != axis:
                axis, out = rule_axis, None
        elif mask is not None:
            chosen = what if mask[i] else None
        else:
            is_chosen = what is not None and is_known and is_worth_it(site, kind, what)
            chosen = what if is_chosen else None
        if chosen is not None:
            fields = i, site.path, chosen, axis, out, axes.is_table, compute
            choices.append(Choice(*fields))
    rules.warn_of_unused()
    return choices


def _filter_mask(where: Any, tree: Any, caller: str) -> list[bool]:
    """Return a flag for each leaf of `tree`; `where` is a filter of `eqx.filter`."""

    flags: list[bool] = []

    def spread(spec, subtree):
        leaves = jax.tree.leaves(subtree, is_leaf=is_implicit)
        if callable(spec):
            flags.extend(bool(spec(leaf)) for leaf in leaves)
        elif isinstance(spec, bool):
            flags.extend([spec] * len(leaves))
        else:
            raise TypeError(
                f"{caller}: where must be a function of a leaf, or a pytree prefix of "
                f"bools and such functions; it holds {spec!r}."
            )

    def is_spec(x):
        return callable(x) and not isinstance(x, eqx.Module)

    jax.tree.map(spread, where, tree, is_leaf=is_spec)
    return flags


def leaves_of(model: Any) -> list:
    """Return the leaves that [`Choice`][] counts. Implicit arrays are leaves."""
    return jax.tree.leaves(model, is_leaf=is_implicit)


def base_of(leaf: Any) -> Any:
    """Return the weight below an adapter, or the leaf if it has no adapter."""
    return leaf.base if isinstance(leaf, LoraArray) else leaf


def replace_base(fn: Callable[[Any], Any], leaf: Any) -> Any:
    """Replace a leaf, or the weight below an adapter, by `fn` of it."""
    if isinstance(leaf, LoraArray):
        return leaf.replace(base=fn(leaf.base))
    return fn(leaf)


def map_weights(fn: Callable, leaf: Any, *others: Any) -> Any:
    """Replace a leaf, or the base, `a` and `b` of an adapter, by `fn` of it and of the
    same weights of the others. A weight without an adapter is a base, and its `a` and
    `b` are None."""
    if not isinstance(leaf, LoraArray):
        return fn(leaf, *map(base_of, others))
    weights = lambda x: (
        (x.base, x.a, x.b) if isinstance(x, LoraArray) else (x, None, None)
    )
    new = tuple(map(fn, *map(weights, (leaf, *others))))
    # Parts may be abstract or missing.
    return eqx.tree_at(weights, leaf, new, is_leaf=lambda x: x is None)


def replace_chosen(
    fn: Callable[[Any, Choice], Any],
    model: Any,
    choices: Iterable,
    *,
    caller: str,
) -> Any:
    """Replace each chosen leaf by `fn(leaf, choice)`. Errors name its path."""
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_implicit)
    for choice in choices:
        with errors_at(f"{caller}: at {choice.path}"):
            leaves[choice.index] = fn(leaves[choice.index], choice)
    return match_layers(jax.tree.unflatten(treedef, leaves))
