"""Run-time checks of the public functions.

`jaxtyping` turns them off: set the environment variable `JAXTYPING_DISABLE=1`, or call
`jaxtyping.config.update("jaxtyping_disable", True)` before the first call.
"""

import functools as ft
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints, TypeVar

from beartype import beartype
from beartype.door import is_bearable
from jaxtyping import jaxtyped, TypeCheckError

from ._messages import not_accepted


_Function = TypeVar("_Function", bound=Callable)


def typed(fn: _Function) -> _Function:
    """Check the types of arguments and results.

    The error about an argument has one line. It contains the argument, its value, the
    accepted types, and advice.
    """

    @ft.cache  # On the first call, because it takes milliseconds.
    def checked() -> Callable:
        return jaxtyped(typechecker=beartype)(fn)

    @ft.wraps(fn)
    def call(*args, **kwargs):
        try:
            return checked()(*args, **kwargs)
        except TypeCheckError:
            message = _first_problem(fn, args, kwargs)
            if message is None:  # The error is about a result.
                raise
        except TypeError:
            message = _wrong_call(fn, args, kwargs)
            if message is None:  # `fn` has raised the error.
                raise
        raise TypeError(message)

    return call  # pyright: ignore[reportReturnType]


def _name(fn: Callable) -> str:
    return fn.__qualname__.removesuffix(".__init__")


def _wrong_call(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return what is wrong with the number or the names of arguments."""
    signature = inspect.signature(fn)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(name for name in signature.parameters if name != "self")
        return f"{_name(fn)}: {error}. The arguments are `{_name(fn)}({names})`."
    return None


def _first_problem(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> str | None:
    hints = get_type_hints(fn, include_extras=True)
    caller = _name(fn)
    with jaxtyped("context"):
        given = list(_arguments(fn, args, kwargs))
        for name, value in given:
            hint = hints.get(name, Any)
            if not is_bearable(value, hint):
                swapped = _swapped(fn, caller, name, given, hints)
                return not_accepted(caller, name, value, hint, swapped)
    return None


def _swapped(
    fn: Callable, caller: str, name: str, given: list, hints: dict[str, Any]
) -> str:
    """Return advice if the value of another argument is accepted as `name`, and the
    value of `name` as the other argument."""
    values = dict(given)
    fits = lambda value, name: is_bearable(value, hints.get(name, Any))
    for other, value in given:
        if other != name and fits(value, name) and fits(values[name], other):
            parameters = inspect.signature(fn).parameters.values()
            required = {p.name for p in parameters if p.default is p.empty}
            shown = required - {"self"} | {name, other}
            order = [p.name for p in parameters if p.name in shown]
            return (
                f"Are {other} and {name} swapped? The order is "
                f"`{caller}({', '.join(order)})`."
            )
    return ""


def _arguments(
    fn: Callable, args: tuple, kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    signature = inspect.signature(fn)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, item) for item in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((name, item) for item in value.values())
        else:
            yield name, value
