"""Implicit arrays inside of callables: arguments, closures, methods, partials.

JAX converts arrays in closures into constants, but an implicit array is not a JAX
array. So a function that closes over one is rebuilt with a placeholder.
"""

import collections
import functools as ft
import types
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from ..arrays import ImplicitArray, is_implicit


_Jit: type = type(jax.jit(lambda: None))
_FilterJit: type = type(eqx.filter_jit(lambda: None))


def _is_leaf(x: Any) -> bool:
    return is_implicit(x) or isinstance(x, _FilterJit) or _is_hollow(x)


def _is_hollow(x: Any) -> bool:
    """Return whether `eqx.partition` took all parts of an implicit array."""
    return isinstance(x, ImplicitArray) and not jax.tree.leaves(x)


def substitute(
    value: Any,
    fn: Callable[[ImplicitArray], Any],
    hollow: Callable[[Any], Any] = lambda q: q,
) -> Any:
    """Replace every implicit array `q` in `value` by `fn(q)`.

    `value` is a pytree whose leaves may be functions. Subtrees without an implicit
    array are returned as the same objects. The order of the calls of `fn` depends only
    on the structure of `value`.

    Replace every array `q` without any part by `hollow(q)`.
    """
    return _Substitution(fn, hollow)(value)


def remove_partners(
    found: Sequence[ImplicitArray], hollow: Sequence[Any]
) -> Callable[[Any], Any]:
    """Return a function that replaces hollow arrays by None if their other halves are
    in `found`.

    The other halves become plain arrays, which `eqx.combine` does not accept beside a
    hollow array. If the parts of a hollow array are arguments of their own, it stays.
    """
    empty = lambda q: jax.tree.structure(jax.tree.map(lambda _: None, q))
    whole = collections.Counter(map(empty, found))
    halves = collections.Counter(map(jax.tree.structure, hollow))
    partners = {half for half, count in halves.items() if whole[half] >= count}
    return lambda q: None if jax.tree.structure(q) in partners else q


class _Substitution:
    def __init__(self, fn, hollow):
        self.fn, self.hollow = fn, hollow
        self.done = {}

    def __call__(self, value):
        try:
            leaves, treedef = jax.tree.flatten(value, is_leaf=_is_leaf)
        except (TypeError, ValueError):
            # Not a pytree, such as a dictionary whose keys cannot be sorted.
            return value
        new = [self.leaf(leaf) for leaf in leaves]
        if all(a is b for a, b in zip(leaves, new, strict=True)):
            return value
        return jax.tree.unflatten(treedef, new)

    def leaf(self, leaf):
        if is_implicit(leaf):
            return self.fn(leaf)
        rebuild = None
        if _is_hollow(leaf):
            return self.hollow(leaf)
        if isinstance(leaf, types.FunctionType):
            rebuild = self.function
        elif isinstance(leaf, types.MethodType):
            rebuild = self.method
        elif isinstance(leaf, ft.partial):
            rebuild = self.partial
        elif isinstance(leaf, (_Jit, _FilterJit)):
            # The function without `jit`, because an outer program traces it.
            rebuild = self.jitted
        if rebuild is None:
            return leaf
        # Recursive functions.
        if id(leaf) not in self.done:
            self.done[id(leaf)] = leaf
            self.done[id(leaf)] = rebuild(leaf)
        return self.done[id(leaf)]

    def method(self, method):
        owner, function = self(method.__self__), self(method.__func__)
        if owner is method.__self__ and function is method.__func__:
            return method
        return types.MethodType(function, owner)

    def partial(self, partial):
        function = self(partial.func)
        args, keywords = self(partial.args), self(partial.keywords)
        new, old = (
            (function, args, keywords),
            (partial.func, partial.args, partial.keywords),
        )
        if all(a is b for a, b in zip(new, old, strict=True)):
            return partial
        return ft.partial(function, *args, **keywords)

    def jitted(self, jitted):
        wrapped = jitted.__wrapped__
        new = self(wrapped)
        return jitted if new is wrapped else new

    def function(self, function):
        cells = function.__closure__ or ()
        contents = [_contents(cell) for cell in cells]
        new_contents = [self(x) for x in contents]
        defaults = self(function.__defaults__)
        keywords = self(function.__kwdefaults__)
        old_globals = _used_globals(function)
        new_globals = {name: self(x) for name, x in old_globals.items()}
        changed = {
            name: x for name, x in new_globals.items() if x is not old_globals[name]
        }
        if (
            all(a is b for a, b in zip(contents, new_contents, strict=True))
            and defaults is function.__defaults__
            and keywords is function.__kwdefaults__
            and not changed
        ):
            return function
        new = types.FunctionType(
            function.__code__,
            {**function.__globals__, **changed} if changed else function.__globals__,
            function.__name__,
            defaults,
            tuple(
                cell if a is b else types.CellType(b)
                for cell, a, b in zip(cells, contents, new_contents, strict=True)
            ),
        )
        new.__kwdefaults__ = keywords
        return new


def _contents(cell):
    try:
        return cell.cell_contents
    except ValueError:  # An empty closure cell.
        return None


def _used_globals(function) -> dict[str, Any]:
    """Return the globals of a function that may contain implicit arrays.

    These are pytrees and functions of the same module.
    """
    module = function.__globals__.get("__name__", "")
    if module.split(".")[0] in ("jax", "equinox", "eqquant"):
        return {}  # They contain no implicit arrays.
    found, pending = {}, [function.__code__]
    while pending:
        code = pending.pop()
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                if value.__globals__ is function.__globals__:
                    found[name] = value
            elif not isinstance(value, types.ModuleType | type):
                found[name] = value
    return found
