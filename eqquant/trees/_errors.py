"""Errors with the place where they occurred."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Prefix a `TypeError` or `ValueError` with a place.

    The new error has exactly this class, because subclasses, such as errors of JAX, may
    take other arguments.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{place}: {error}") from error
