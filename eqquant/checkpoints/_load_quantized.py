"""Quantize weights while loading, one tensor after the other."""

import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import typed
from ..arrays import is_implicit, QuantizedArray
from ..formats import Format
from ..kernels import as_compute, Compute
from ..trees import (
    Choice,
    choose,
    errors_at,
    match_layers,
    sites,
    Tree,
    warn_of_left_out,
    with_progress,
)
from ._abstract import abstract_leaf, abstract_quantized
from ._layout import Layout
from ._load import is_array
from ._open import ForeignContents, open_contents
from ._pieces import quantize_in_pieces
from ._plan import CALLER, check_all_used, Pattern, Plan, plan_leaf
from .files import (
    fill,
    kept,
    Part,
    Path,
    release,
    SharedPages,
    to_jax,
    with_abstract_arrays,
)
from .leaves import Contents


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
    decode: bool | Literal["all"] = False,
    abstract: bool = False,
    check_finite: bool = True,
    progress: bool | None = None,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> Tree:
    """Load a model from safetensors, and quantize its weights while loading.

    Tensors are read, quantized and freed one at a time. So the peak memory is the
    quantized model plus two tensors, however large the checkpoint is. The result equals
    [`eqquant.quantize_tree`][] bit for bit. Arrays that are not quantized anew may stay
    in the memory of the file, as in [`eqquant.load`][]. Stacks are filled in place, on
    all cores.

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

    - `path`: a `.safetensors` or GGUF file, the index of several files
        (`.safetensors.index.json`), or a folder with safetensors, for example from
        Hugging Face.
    - `like`: the model, with arrays or the `jax.ShapeDtypeStruct`s of
        `eqx.filter_eval_shape`. Leaves that are not arrays are kept.
    - `format`, `where`, `rules`, `min_size`, `check_finite`, `progress`: as in
        [`eqquant.quantize_tree`][].
    - `names`: a function from the path of an array in `like`, such as
        `layers.0.weight`, to the name of its tensor. For layers that are stacked for
        `jax.lax.scan`, it returns a list of names, and their tensors are stacked along
        a new leading axis. Nested lists stack along several axes. It may also return a
        [`Concatenated`][eqquant.checkpoints.Concatenated], or lists of them, for rows
        of several tensors. `None` keeps the array in `like`. By default the name is the
        path.
    - `ignore`: patterns for the names of tensors that the model does not need: strings
        with `*` and `?`, as in rules, or compiled regular expressions.
    - `formats`: as in [`eqquant.load`][].
    - `decode`: decode tensors of another library for which eqquant has no exact format,
        such as GGUF `Q4_K`, and stacks of tensors with different formats. `format` and
        `rules` then apply to the decoded tensors. `"all"` decodes every tensor that
        another library quantized, so that `format` quantizes it again.
    - `abstract`: return a `jax.ShapeDtypeStruct` for each array, without reading
        tensors, so that programs can be compiled while the arrays are loaded. Weights
        that another library quantized must be in a GGUF file.
    - `precision`, `activations`, `compute`: as in [`eqquant.quantize`][], for all
        quantized arrays of the result.

    Tensors are converted to the dtypes in `like`, floats to floats and integers to
    integers. Weights that the file stores in quantized form, from eqquant or another
    library, keep their format: see [`eqquant.checkpoints.read_checkpoint`][].

    **Returns:**

    A pytree of the type of `like`, its weights replaced by
    [`eqquant.QuantizedArray`][].

    **Raises:**

    - `ValueError` if the file is damaged; if a tensor is missing, has another shape, or
        has values that the dtype in `like` cannot represent; if the file has tensors
        that are neither used nor ignored; or if weights are not finite.
    - The errors of [`eqquant.quantize_tree`][].
    """
    compute = as_compute(compute, precision, activations)
    names = names or (lambda path: path)
    patterns = [ignore] if isinstance(ignore, Pattern) else list(ignore)
    with open_contents(path, formats, CALLER, decode=decode) as contents:
        choices = _choose(like, format, where, rules, min_size)
        plans = [
            plan_leaf(site, contents, names, choices.get(i))
            for i, site in enumerate(sites(like))
        ]
        check_all_used(contents, plans, patterns)
        elements = sum(plan.size for plan in plans)
        if abstract:
            leaves = [abstract_leaf(contents, plan, compute) for plan in plans]
        else:
            shown = with_progress(plans, elements, progress, caller=CALLER)
            pages = SharedPages()
            leaves = [
                _load(contents, plan, check_finite, compute, pages) for plan in shown
            ]
    treedef = jax.tree.structure(like, is_leaf=is_implicit)
    return match_layers(jax.tree.unflatten(treedef, leaves))


def _choose(like, format, where, rules, min_size) -> dict[int, Choice]:
    def choose_among_arrays(model):
        options = {"where": where, "rules": rules, "min_size": min_size}
        choices = choose(model, format, caller=CALLER, may_be_quantized=True, **options)
        warn_of_left_out(model, choices, format, caller=CALLER, **options)
        return choices

    choices = with_abstract_arrays(choose_among_arrays, like)
    return {choice.index: choice for choice in choices}


def _load(
    contents: Contents | ForeignContents,
    plan: Plan,
    check_finite: bool,
    compute: Compute,
    pages: SharedPages,
) -> Any:
    leaf, layout, choice = plan.site.leaf, plan.layout, plan.choice
    if layout is None:
        return leaf
    if not is_array(leaf):
        return contents.read(layout.names[0])
    is_quantized = contents.are_quantized(layout.names)

    def read(name: str) -> Any:
        if jnp.issubdtype(contents.described[name].dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name!r} is a random key: use `load`.")
        return contents.read_array(name, leaf.dtype)

    with errors_at(f"{CALLER}: at {plan.site.path}"):
        if is_quantized:
            out = _read_quantized(layout, contents)
        elif choice is not None:
            out = _quantize(layout, read, leaf, choice, check_finite)
        else:
            out = _assemble(layout, read, threads=0)
        if is_implicit(out):
            out = jax.tree.map(lambda part: to_jax(pages.copy(part)), out)
            out = out.with_dtype(leaf.dtype)
            return out.with_static(compute=plan.compute or compute)
        return kept(out) if isinstance(leaf, np.ndarray) else to_jax(out)


def _quantize(layout: Layout, read: Callable, leaf, choice: Choice, check_finite):
    axes = (choice.axis,) if isinstance(choice.axis, int) else choice.axis
    axes = tuple(a if a < 0 else a - leaf.ndim for a in axes)
    stacked = len(layout.stacked)

    def quantize(array):
        options = {"check_finite": check_finite}
        q = quantize_in_pieces(array, choice.format, axes, **options)
        release(array)
        return q

    if not layout.lead:
        return quantize(read(layout.names[0]))
    parts = jax.tree.leaves(abstract_quantized(leaf, choice))
    if any(x.shape[: len(layout.lead)] != layout.lead for x in parts):
        # Tensors share scales, so quantize all at once.
        return quantize(_assemble(layout, read))

    def quantize_one(name: str) -> Any:
        # With an axis of size 1 for each stacked axis.
        q = quantize(np.expand_dims(read(name), tuple(range(stacked))))
        return jax.tree.map(lambda part: np.asarray(part)[(0,) * stacked], q)

    return _assemble(layout, quantize_one)


def _read_quantized(layout: Layout, contents: Contents | ForeignContents) -> Any:
    """Read a quantized array, unchanged."""

    def read(name: str) -> Any:
        q = contents.read(name)
        if not isinstance(q, QuantizedArray):
            raise ValueError(
                f"{name!r} is not quantized, but other tensors of its array are."
            )
        return q

    if isinstance(contents, Contents):
        return _assemble(layout, read, threads=0)
    readers = [contents.by_rows(name) for name in layout.names]
    known = [reader for reader in readers if reader is not None]
    if len(known) < len(readers):
        return _assemble(layout, read)
    parts = []
    for tensor, reader in zip(layout.tensors, known, strict=True):
        first = 0 if tensor.rows is None else tensor.rows.start
        for rows in reader.places:
            place = *tensor.index, slice(first + rows.start, first + rows.stop)
            parts.append(Part(tensor.name, place, ft.partial(reader.read, rows)))
    rows = known[0].places[-1].stop if layout.rows is None else layout.rows
    return known[0].build(fill((*layout.stacked, rows), parts))


def _assemble(layout: Layout, make: Callable[[str], Any], threads: int = 1) -> Any:
    """Put `make(name)` of all tensors into their places, one after the other or in
    several threads."""
    if not layout.lead:
        return make(layout.names[0])
    reader = lambda name: lambda out: make(name)
    parts = [Part(t.name, t.place, reader(t.name)) for t in layout.tensors]
    return fill(layout.lead, parts, threads=threads)
