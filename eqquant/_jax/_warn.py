"""Warnings that point at the user's code."""

import sys
import warnings

from ._compat import frames_of


_internal = ("eqquant", "jax", "equinox", "jaxtyping", "beartype", "contextlib")
# Warnings that were shown. Python's own filter shows a warning once per location, but
# it starts again after every `warnings.catch_warnings`, which JAX enters often.
_shown: set[tuple] = set()


def _module(frame) -> str:
    return frame.f_globals.get("__name__", "")


def _user_frame():
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame).split(".")[0] in _internal:
        frame = frame.f_back
    return frame


def source_of(eqn) -> str:
    """Return the location of an equation in the user's code, `file:line (function)`.

    Without source information, return the location of the innermost user frame.
    """
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _internal]
    folders = tuple(f.removesuffix("__init__.py") for f in files if f)
    for frame in frames_of(eqn):
        if not frame.startswith(folders):
            return frame
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def warn(message: str, category: type[Warning], *, once: bool = False) -> None:
    """Issue a warning whose location is the innermost frame of the user."""
    frame = _user_frame()
    place = (message, frame.f_code.co_filename, frame.f_lineno)
    if once and place in _shown:
        return
    warnings.warn_explicit(message, category, *place[1:], module=_module(frame))
    if once:  # Not reached if a filter turns the warning into an error.
        _shown.add(place)
