"""Sentences about arguments that are not accepted.

Each sentence contains the argument, its value, the accepted values, and advice, in this
order. Two attributes of a class add words: `_accepted_as` names its instances as
arguments, and `_misplaced` is advice for an instance in the wrong place.
"""

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin, Literal, TypeGuard, Union

import jax
import numpy as np
from jaxtyping import AbstractArray


_longest = 80


def wrong(caller: str, name: str, value: Any, accepted: str, advice: str = "") -> str:
    """Return the text of an error about an argument."""
    prefix = f"{caller}: " if caller else ""
    text = f"{prefix}{name} is {given(value)}, but must be {accepted}."
    return f"{text} {advice}" if advice else text


def check_one_of(caller: str, name: str, value: Any, accepted: Iterable[Any]) -> None:
    """Raise a `ValueError` if an argument is not one of the accepted values."""
    if value not in (accepted := tuple(accepted)):
        prefix = f"{caller}: " if caller else ""
        raise ValueError(f"{prefix}{name} must be one of {accepted}, got {value!r}.")


def not_accepted(
    caller: str, name: str, value: Any, hint: Any, otherwise: str = ""
) -> str:
    """Return the text of an error about an argument that violates its annotation.
    `otherwise` is advice if the value itself suggests none."""
    options = _options(hint)
    *most, last = dict.fromkeys(map(_words, options))
    accepted = f"{', '.join(most)} or {last}" if most else last
    advice = _advice(value, options) or otherwise
    return wrong(caller, name, value, accepted, advice)


def given(value: Any) -> str:
    """Return a short description of a value that a user has passed."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    if value is None or isinstance(value, bool | int | float | str):
        return _short(value)
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        kind = "abstract array" if isinstance(value, jax.ShapeDtypeStruct) else "array"
        return f"{_with_article(f'{value.dtype} {kind}')} of shape {value.shape}"
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{_with_article(f'{value.dtype} {kind}')} of shape {value.shape}"
    if jax.tree_util.all_leaves([value]):
        return _short(value)
    # The text of a model would be long.
    short = isinstance(value, list | tuple | dict) and len(repr(value)) <= _longest
    return f"the {kind} {value!r}" if short else _with_article(kind)


def counted(count: int, one: str, several: str) -> str:
    """Return a number and its noun: `counted(2, "array", "arrays")` is "2 arrays"."""
    return f"{count:,} {one if count == 1 else several}"


def is_class_of(value: Any, *classes: type) -> TypeGuard[type]:
    """Return whether a value is a class whose instances are accepted."""
    return isinstance(value, type) and issubclass(value, classes)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _longest else f"{text[:_longest]}..."


def _with_article(noun: str) -> str:
    # Acronyms are spelled: an MLP.
    vowels = "AEFHILMNORSX" if noun[:2].isupper() else "aeiouAEIOU"
    return f"{'an' if noun[0] in vowels else 'a'} {noun}"


def _options(hint: Any) -> list:
    if get_origin(hint) in (Union, types.UnionType):
        return [option for arg in get_args(hint) for option in _options(arg)]
    return [hint]


_nouns: dict[Any, str] = {
    Callable: "a function",
    Iterable: "an iterable",
    Mapping: "a mapping",
    Sequence: "a sequence",
    type(None): "None",
}


def _words(option: Any) -> str:
    if option is None:
        return "None"
    if isinstance(option, type) and issubclass(option, AbstractArray):
        axes = ", ".join(option.dim_str.split())
        floats = isinstance(option.dtypes, list | tuple) and all(
            "float" in str(dtype) for dtype in option.dtypes
        )
        shape = "" if axes in ("", "...") else f" ({axes})"
        return f"{'a floating-point' if floats else 'an'} array{shape}"
    origin, args = get_origin(option), get_args(option)
    if origin is Literal:
        return f"one of {args}"
    if origin is type:
        return f"a subclass of {args[0].__name__}"
    noun = _nouns.get(origin or option)
    if noun is None:
        return getattr(option, "_accepted_as", None) or _with_article(
            getattr(option, "__name__", str(option))
        )
    if origin is Sequence:
        items = (getattr(arg, "__name__", str(arg)) for arg in _options(args[0]))
        return f"{noun} of {' or '.join(items)}"
    return noun


def _is_dtype(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, np.generic)
    is_class = is_class or (callable(value) and hasattr(value, "dtype"))  # jnp.int8
    return is_class or isinstance(value, np.dtype)


def _advice(value: Any, options: Sequence) -> str:
    classes = [option for option in options if isinstance(option, type)]
    accepts_array = any(issubclass(cls, AbstractArray) for cls in classes)
    if is_class_of(value, *classes):
        return f"Did you mean `{value.__name__}()`?"
    if str in classes and _is_dtype(value):
        return "Pass a name such as 'int8' instead of a dtype."
    if misplaced := getattr(value, "_misplaced", None):
        return misplaced
    if accepts_array and isinstance(value, list | tuple):
        return "Convert it with `jnp.asarray`."
    if accepts_array and isinstance(value, jax.ShapeDtypeStruct):
        return "Wrap the call in `jax.eval_shape`."
    if int in classes and isinstance(value, float) and value.is_integer():
        return f"Did you mean {int(value)}?"
    if accepts_array and not jax.tree_util.all_leaves([value]):
        return "Functions with names that end in `_tree` accept whole models."
    if [get_origin(option) for option in options] == [Sequence]:
        if not isinstance(value, list | tuple):
            return "Pass a list, also for one item."
        items = [o for o in _options(get_args(options[0])[0]) if isinstance(o, type)]
        wrong_items = (v for v in value if is_class_of(v, *items))
        return next((f"Did you mean `{v.__name__}()`?" for v in wrong_items), "")
    return ""
