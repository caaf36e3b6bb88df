"""Which arrays of a pytree are weights worth quantizing, how, and along which axis."""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._array import is_quantized
from ._implicit import is_implicit
from ._lora import LoraArray
from ._warn import warn
from .formats import as_format, Format


Axis = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What [`eqquant.quantize_tree`][] does with the arrays that a pattern matches.

    **Arguments:**

    - `format`: a format, or the name of one; `None` to leave them as they are.
    - `axis`: as in [`eqquant.quantize`][]; `None` for what the layer contracts.
    """

    format: Format | str | None
    axis: Axis | None = None


@dataclasses.dataclass(frozen=True)
class Site:
    """A leaf of a pytree, and what is known of the node that holds it."""

    path: str
    leaf: Any
    owner: Any
    field: str
    # Inside of a layer that computes its weight anew at each call.
    reparameterised: bool


def sites(tree: Any) -> Iterator[Site]:
    """Every leaf, in the order of `jax.tree.leaves`; implicit arrays are leaves."""
    return _sites(tree, "", None, "", False)


def _sites(node, path, owner, field, reparameterised) -> Iterator[Site]:
    children = [] if is_implicit(node) else _children(node)
    if children is None or is_implicit(node):
        yield Site(path, node, owner, field, reparameterised)
        return
    inside = reparameterised or isinstance(
        node, eqx.nn.SpectralNorm | eqx.nn.WeightNorm
    )
    # A container inside of a layer is part of it: the weights of a list, say.
    for key, child in children:
        name = _key_name(key)
        below = f"{path}.{name}" if path else name
        yield from _sites(child, below, node, name, inside)


def _children(node) -> list[tuple[Any, Any]] | None:
    """The children of a node, or None for a leaf."""
    children, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    if jtu.treedef_is_leaf(treedef) and children and children[0][1] is node:
        return None
    return [(keys[0], child) for keys, child in children]


def _key_name(key) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


#
# What a leaf is
#


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight, and the axis (or axes) that its layer contracts; the one that it puts
    out, or None for all others; and whether it is looked up rather than multiplied."""

    axis: Axis
    out: int | None = None
    is_table: bool = False


# Names of dictionary entries: what Flax and Haiku call their weights.
_kernels, _tables = ("kernel", "w"), ("embedding", "embeddings")


def classify(site: Site) -> Weight | str:
    """A weight, or the reason why it is none."""
    if is_quantized(site.leaf):
        return "already quantized"
    return role(site)


def role(site: Site) -> Weight | str:
    """The same, whether it is quantized already or not."""
    leaf, owner, field = site.leaf, site.owner, site.field
    if not is_implicit(leaf) and not eqx.is_inexact_array(leaf):
        return "not a floating-point array"
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"of dtype {leaf.dtype}"
    if site.reparameterised:
        return "normalised anew at each call"
    if isinstance(owner, eqx.nn.Linear | eqx.nn.Embedding) and field == "weight":
        is_table = isinstance(owner, eqx.nn.Embedding)
        return Weight(-1, -2, is_table) if leaf.ndim > 1 else "of one axis"
    if isinstance(owner, eqx.nn.Conv | eqx.nn.ConvTranspose) and field == "weight":
        window = owner.num_spatial_dims
        return Weight(tuple(range(-window - 1, 0)), -window - 2)
    recurrent = isinstance(owner, eqx.nn.GRUCell | eqx.nn.LSTMCell)
    if recurrent and field in ("weight_ih", "weight_hh"):
        return Weight(-1, -2)
    if isinstance(owner, Mapping):
        if field in _tables and leaf.ndim == 2:
            return Weight(-1, is_table=True)
        if field in _kernels and leaf.ndim == 2:
            return Weight(0)
        if field in _kernels and leaf.ndim > 3:
            return Weight(tuple(range(leaf.ndim - 1)))
        if field in _kernels and leaf.ndim == 3:
            return "a kernel whose contracted axes only a rule can tell"
    return "not the weight of a known layer"


def is_never_a_weight(site: Site) -> bool:
    """Part of a layer whose weights are known, and not one of them: a bias, a norm."""
    if site.reparameterised:
        return True
    known = type(site.owner).__module__.startswith("equinox.nn")
    return known and isinstance(role(site), str)


#
# Rules
#


class Rules:
    """Ordered rules by path; the first that matches wins.

    `parse` says what a rule is: what becomes of a weight (None: nothing) and its axis
    (None: what its layer contracts).
    """

    def __init__(
        self,
        rules: Mapping[str | re.Pattern, Any] | None,
        parse: Callable[[Any], tuple[Any, Axis | None]],
        caller: str,
    ):
        self._rules = []
        for pattern, rule in (rules or {}).items():
            if not isinstance(pattern, str | re.Pattern):
                raise TypeError(
                    f"{caller}: rules must have strings (with * and ?) or compiled "
                    f"regular expressions as patterns, got {pattern!r}."
                )
            self._rules.append((pattern, parse(rule)))
        self._used: set = set()

    def find(self, site: Site) -> tuple[Any, Axis | None] | None:
        for pattern, rule in self._rules:
            if self._matches(pattern, site.path):
                excluded = site.leaf.ndim < 2 or is_never_a_weight(site)
                if excluded and rule[0] is not None and pattern != site.path:
                    continue
                self._used.add(pattern)
                return rule
        return None

    def unused(self) -> list:
        return [pattern for pattern, _ in self._rules if pattern not in self._used]

    @staticmethod
    def _matches(pattern, path: str) -> bool:
        if isinstance(pattern, re.Pattern):
            return pattern.fullmatch(path) is not None
        return fnmatch.fnmatchcase(path, pattern)


def _format_rule(rule: Any) -> tuple[Format | None, Axis | None]:
    if isinstance(rule, tuple):
        rule = Rule(*rule)
    elif not isinstance(rule, Rule):
        rule = Rule(rule)
    return None if rule.format is None else as_format(rule.format), rule.axis


def _filter_mask(where: Any, tree: Any, caller: str) -> list[bool]:
    """For each leaf of `tree` what `where`, as `eqx.filter` takes it, says."""

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


#
# The choice
#


@dataclasses.dataclass(frozen=True)
class Choice:
    """One weight that is chosen: the how-manyth leaf it is; what becomes of it, a
    format or whatever else rules were about, and along which axis; the axis (or axes)
    that its layer contracts, and what it puts out, as in [`Weight`][]."""

    index: int
    path: str
    what: Any
    axis: Axis
    contracted: Axis
    out: int | None

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
) -> list[Choice]:
    """What [`eqquant.quantize_tree`][] quantizes, for arguments as it takes them.

    `caller` is who says so in errors.
    """

    def is_float(leaf):
        leaf = leaf.base if isinstance(leaf, LoraArray) else leaf
        return eqx.is_array(leaf) or isinstance(leaf, np.ndarray)

    def is_worth_it(leaf, kind: Weight, format: Format) -> bool:
        return not too_small(leaf, format, kind.axis, min_size)

    return choose_among(
        is_float,
        model,
        None if format is None else as_format(format),
        is_worth_it=is_worth_it,
        where=where,
        rules=Rules(rules, _format_rule, caller),
        caller=caller,
    )


def choose_among(
    is_candidate: Callable[[Any], bool],
    model: Any,
    what: Any,
    *,
    is_worth_it: Callable[[Any, Weight, Any], bool],
    where: Any,
    rules: Rules,
    caller: str,
) -> list[Choice]:
    """Of the leaves that are candidates: those that rules say; then those that `where`
    says or, without it, the weights of layers that are worth it, for `what` (None: none
    of these)."""
    mask = None if where is None else _filter_mask(where, model, caller)
    if mask is not None and len(mask) != len(leaves_of(model)):
        raise ValueError(f"{caller}: where must be a pytree prefix of model.")

    choices: list[Choice] = []
    for i, site in enumerate(sites(model)):
        if not is_candidate(site.leaf):
            continue
        kind = role(site)
        natural = kind if isinstance(kind, Weight) else Weight(-1)
        contracted = natural.axis
        rule = rules.find(site)
        if rule is not None:
            chosen, axis = rule
            if axis is not None and axis != natural.axis:
                natural = Weight(axis)
        elif mask is not None:
            chosen = what if mask[i] else None
        else:
            worth_it = (
                what is not None
                and isinstance(kind, Weight)
                and is_worth_it(site.leaf, kind, what)
            )
            chosen = what if worth_it else None
        if chosen is not None:
            axis, out = natural.axis, natural.out
            choices.append(Choice(i, site.path, chosen, axis, contracted, out))
    if rules.unused():
        unused = rules.unused()
        warn(f"{caller}: these rules match nothing: {unused}.", UserWarning)
    return choices


def leaves_of(model: Any) -> list:
    """The leaves that [`Choice`][] counts: implicit arrays are leaves."""
    return jax.tree.leaves(model, is_leaf=is_implicit)


def replace_chosen(
    fn: Callable[[Any, Choice], Any],
    model: Any,
    choices: Iterable,
    *,
    caller: str,
) -> Any:
    """The model with each leaf that was chosen replaced by `fn(leaf, choice)`, one
    after the other; errors name its path."""
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_implicit)
    for choice in choices:
        try:
            leaves[choice.index] = fn(leaves[choice.index], choice)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{caller}: at {choice.path}: {error}") from error
    return jax.tree.unflatten(treedef, leaves)


def too_small(leaf, format: Format, axis: Axis, min_size: int = 256) -> str | None:
    """Why a weight is not worth quantizing, if it is not."""
    if leaf.size < min_size:
        return f"smaller than {min_size}"
    axes = (axis,) if isinstance(axis, int) else axis
    size = math.prod(leaf.shape[a] for a in axes)
    stored = format.padded(size) * format.bits / 8 + format.scale_bytes(size)
    if stored >= size * leaf.dtype.itemsize:
        return f"no smaller as {format!r}"
    return None
