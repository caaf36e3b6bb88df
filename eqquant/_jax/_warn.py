"""Warnings that point at the user's code."""

import sys
import warnings

from ._compat import frames_of


_internal = ("eqquant", "jax", "equinox", "jaxtyping", "beartype", "contextlib")
# Python's own filter shows a warning once for each place, but forgets what it has shown
# whenever anything enters `warnings.catch_warnings`, as JAX does all the time.
_shown: set[tuple] = set()


def _module(frame) -> str:
    return frame.f_globals.get("__name__", "")


def _user_frame():
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame).split(".")[0] in _internal:
        frame = frame.f_back
    return frame


def source_of(eqn) -> str:
    """Where in the user's code an equation comes from, `file:line (function)`; if that
    is not known, the user's code that is running."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _internal]
    folders = tuple(f.removesuffix("__init__.py") for f in files if f)
    for frame in frames_of(eqn):
        if not frame.startswith(folders):
            return frame
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def warn(message: str, category: type[Warning], *, once: bool = False) -> None:
    """Warn, as if from the innermost frame that is the user's."""
    frame = _user_frame()
    place = (message, frame.f_code.co_filename, frame.f_lineno)
    if once and place in _shown:
        return
    warnings.warn_explicit(message, category, *place[1:], module=_module(frame))
    if once:  # Not if the filter has turned it into an error.
        _shown.add(place)
