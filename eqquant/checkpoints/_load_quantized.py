"""Quantizing while loading: one tensor after the other."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import typed
from ..arrays import is_implicit, QuantizedArray
from ..formats import Format
from ..trees import (
    Choice,
    choose,
    match_layers,
    Site,
    sites,
    Tree,
    warn_of_nothing,
    with_progress,
)
from ._errors import with_place
from ._load import is_array
from ._open import ForeignContents, open_contents
from ._pieces import quantize_in_pieces
from .files import about_arrays, empty, Path, to_jax
from .leaves import Contents, is_no_data


_caller = "load_quantized"
Pattern = str | re.Pattern
AnyContents = Contents | ForeignContents


@typed
def load_quantized(
    path: Path,
    like: Tree,
    format: Format | str | None = "nf4",
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
    names: Callable[[str], Any] | None = None,
    ignore: Pattern | Sequence[Pattern] = (),
    formats: Sequence[type[Format]] = (),
    decode: bool = False,
    check_finite: bool = True,
    progress: bool | None = None,
) -> Tree:
    """Load a model from safetensors, and quantize its weights on the way.

    One tensor is read, quantized and forgotten before the next. So this takes the
    memory of the quantized model, and of two tensors, however large the checkpoint is.
    The result is that of [`eqquant.quantize_tree`][], bit for bit.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import tempfile

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, model)

        skeleton = eqx.filter_eval_shape(lambda: model)
        quantized = eqquant.load_quantized(path, skeleton, "nf4")
        assert eqx.tree_equal(quantized, eqquant.quantize_tree(model, "nf4"))
        ```

    **Arguments:**

    - `path`: a `.safetensors` or GGUF file, the index of several
        (`.safetensors.index.json`), or a folder that holds safetensors, as those of
        Hugging Face do.
    - `like`: the model, of arrays or of `jax.ShapeDtypeStruct`s, such as
        `eqx.filter_eval_shape` makes. Leaves that are not arrays are taken from it.
    - `format`, `where`, `rules`, `min_size`, `check_finite`, `progress`: as in
        [`eqquant.quantize_tree`][].
    - `names`: a function from the path of an array in `like`, such as
        `layers.0.weight`, to the name of its tensor. For layers that are stacked, as
        for `jax.lax.scan`, it returns a list of names, and their tensors are stacked
        along a new leading axis; a list of lists for two such axes. `None` takes the
        array from `like`. By default the name is the path.
    - `ignore`: patterns of the names of tensors that the model does not need, as in
        rules: strings in which `*` and `?` match anything, or compiled regular
        expressions.
    - `formats`: as in [`eqquant.load`][].
    - `decode`: for a checkpoint that another library quantized: decode tensors that no
        format of eqquant holds, such as `Q4_K` of GGUF, and layers that are stacked but
        not quantized alike. They are then quantized again, as `format` and `rules` say.

    Tensors are converted to the dtypes in `like`, floats to floats and integers to
    integers. Weights that the file holds quantized, by eqquant or by another library,
    stay as they are: see [`eqquant.checkpoints.read_checkpoint`][].

    **Returns:**

    A pytree of the type of `like`, its weights replaced by
    [`eqquant.QuantizedArray`][].

    **Raises:**

    - `ValueError` if the file is damaged; if a tensor is missing, has another shape, or
        has values that the dtype in `like` cannot hold; if the file has tensors that
        are neither used nor ignored; or if weights are not finite.
    - `ValueError` or `TypeError` as [`eqquant.quantize_tree`][].
    """
    names = names or (lambda path: path)
    patterns = [ignore] if isinstance(ignore, Pattern) else list(ignore)
    with open_contents(path, formats, _caller, decode=decode) as contents:
        choices = _choose(like, format, where, rules, min_size)
        plans = [
            _plan(site, contents, names, choices.get(i))
            for i, site in enumerate(sites(like))
        ]
        _check_all_used(contents, plans, patterns)
        elements = sum(plan.size for plan in plans)
        leaves = []
        for plan in with_progress(plans, elements, progress, caller=_caller):
            leaves.append(_load(contents, plan, check_finite))
    treedef = jax.tree.structure(like, is_leaf=is_implicit)
    return match_layers(jax.tree.unflatten(treedef, leaves))


def _choose(like, format, where, rules, min_size) -> dict[int, Choice]:
    def choose_among_arrays(model):
        options = {"where": where, "rules": rules, "min_size": min_size}
        choices = choose(model, format, caller=_caller, **options)
        if not choices and format is not None:
            warn_of_nothing(model, _caller)
        return choices

    choices = about_arrays(choose_among_arrays, like)
    return {choice.index: choice for choice in choices}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A leaf of `like`; the names of its tensors, an array of as many axes as are
    stacked; and what becomes of it. Without names it stays."""

    site: Site
    names: np.ndarray | None
    choice: Choice | None

    @property
    def size(self) -> int:
        return 0 if self.names is None else getattr(self.site.leaf, "size", 0)


def _plan(site: Site, contents: AnyContents, names: Callable, choice) -> _Plan:
    leaf, path = site.leaf, site.path
    if is_implicit(leaf):
        raise ValueError(
            f"{_caller}: at {path}: like must be a model without quantized arrays and "
            f"adapters, but holds {leaf!r}."
        )
    if not is_array(leaf):
        # A number that was saved with the model.
        saved = type(contents.described.get(path)) is type(leaf)
        saved = saved and not is_no_data(leaf)
        return _Plan(site, _table(path, path) if saved else None, None)
    given = names(path)
    if given is None:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{_caller}: at {path}: {leaf} cannot be loaded. Give like an array "
                "in this place, which is then taken as it is."
            )
        return _Plan(site, None, None)
    table = _table(given, path)
    for name in table.flat:
        _check(name, table, site, contents)
    return _Plan(site, table, choice)


def _check(name: str, table: np.ndarray, site: Site, contents: AnyContents) -> None:
    """That a tensor is there, and fits."""
    leaf, at = site.leaf, f"{_caller}: at {site.path}"
    if name not in contents.described:
        raise ValueError(
            f"{at}: {contents.path} has no tensor {name!r}." + _similar(name, contents)
        )
    found = contents.described[name]
    if is_implicit(found) and not isinstance(found, QuantizedArray):
        raise ValueError(f"{at}: {name!r} is a {type(found).__name__}: use `load`.")
    if not is_implicit(found) and not is_array(found):
        raise ValueError(f"{at}: expected an array, but {name!r} is {found!r}.")
    stacked = f", and {table.shape} of it are stacked" if table.ndim else ""
    if (*table.shape, *found.shape) != tuple(leaf.shape):
        raise ValueError(
            f"{at}: expected the shape {tuple(leaf.shape)}, but {name!r} has "
            f"{found.shape}{stacked}."
        )


def _table(given: Any, path: str) -> np.ndarray:
    """Names in lists of lists as an array."""

    def shape_of(x) -> tuple[int, ...]:
        if isinstance(x, str):
            return ()
        if not isinstance(x, list | tuple) or not x:
            raise TypeError(
                f"{_caller}: at {path}: names must return a string, a (nested) list of "
                f"strings, or None; got {given!r}."
            )
        shapes = {shape_of(y) for y in x}
        if len(shapes) > 1:
            raise ValueError(
                f"{_caller}: at {path}: the lists of names are not of equal lengths."
            )
        return (len(x), *shapes.pop())

    def flat(x) -> Iterator[str]:
        if isinstance(x, str):
            yield x
        else:
            for y in x:
                yield from flat(y)

    shape = shape_of(given)
    table = np.empty(shape, object)
    table.reshape(-1)[:] = list(flat(given))
    return table


def _similar(name: str, contents: AnyContents) -> str:
    end = name.rsplit(".", 1)[-1]
    names = list(contents.described)
    found = [other for other in names if other.rsplit(".", 1)[-1] == end]
    found = (found or names)[:3]
    return f" It has {', '.join(map(repr, found))}, ..." if found else ""


def _check_all_used(
    contents: AnyContents, plans: list[_Plan], ignore: Sequence[Pattern]
) -> None:
    used = {name for p in plans if p.names is not None for name in p.names.flat}

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
            f"{_caller}: the model has no place for {', '.join(map(repr, unused[:5]))}"
            f"{more}. If it does not need them, name them in ignore."
        )


def _load(contents: AnyContents, plan: _Plan, check_finite: bool) -> Any:
    leaf, table, choice = plan.site.leaf, plan.names, plan.choice
    if table is None:
        return leaf
    if not is_array(leaf):
        return contents.read(table.item())

    quantized = contents.are_quantized(list(table.flat))

    def read(name: str) -> Any:
        # With an axis of one for each along which it is stacked.
        lead = (1,) * table.ndim
        add_axes = lambda part: part.reshape(lead + part.shape)
        found = contents.described[name]
        if quantized:
            q = contents.read(name)
            if not isinstance(q, QuantizedArray):
                raise ValueError(f"{name!r} is not quantized; others of its stack are.")
            return jax.tree.map(lambda part: add_axes(np.asarray(part)), q)
        if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name!r} is a random key: use `load`.")
        return add_axes(contents.read_array(name, leaf.dtype))

    try:
        if choice is not None and not quantized:
            return _quantize(table, read, leaf, choice, check_finite)
        out = _stack(table, read)
        if is_implicit(out):
            return jax.tree.map(to_jax, out).with_dtype(leaf.dtype)
        return out if isinstance(leaf, np.ndarray) else to_jax(out)
    except (TypeError, ValueError) as error:
        raise with_place(error, f"{_caller}: at {plan.site.path}") from error


def _quantize(table: np.ndarray, read: Callable, leaf, choice: Choice, check_finite):
    axes = (choice.axis,) if isinstance(choice.axis, int) else choice.axis
    axes = tuple(a if a < 0 else a - leaf.ndim for a in axes)

    def quantized(array):
        return quantize_in_pieces(array, choice.format, axes, check_finite=check_finite)

    if min(axes) + leaf.ndim < table.ndim:
        # What is stacked shares scales, so all of it is needed at once.
        out = quantized(_stack(table, read))
    else:
        out = _stack(table, lambda name: quantized(read(name)))
    return jax.tree.map(to_jax, out)


def _stack(table: np.ndarray, one: Callable[[str], Any]) -> Any:
    """`one(name)` of all the names, stacked along the axes in front. Each is written
    where it belongs, so that the stack is in memory once."""
    if not table.ndim:
        return one(table.item())
    stacks: list[np.ndarray] = []
    first: Any = None
    for index in np.ndindex(table.shape):
        name = str(table[index])
        parts, treedef = jax.tree.flatten(one(name))
        if not stacks:
            first = treedef
            shapes = [(*table.shape, *part.shape[table.ndim :]) for part in parts]
            stacks = [empty(s, p.dtype) for s, p in zip(shapes, parts, strict=True)]
        if treedef != first or any(
            stack.shape[table.ndim :] != part.shape[table.ndim :]
            or stack.dtype != part.dtype
            for stack, part in zip(stacks, parts, strict=True)
        ):
            raise ValueError(
                f"{name!r} is not stored as {table.flat[0]!r} is, so they "
                "cannot be stacked."
            )
        for stack, part in zip(stacks, parts, strict=True):
            place = (*index, ...)
            stack[place] = np.asarray(part)[(0,) * table.ndim]
    return jax.tree.unflatten(first, stacks)
