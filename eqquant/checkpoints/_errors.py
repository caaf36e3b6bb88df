"""Errors that say where."""


def with_place(error: Exception, place: str) -> Exception:
    """The same error, with the place before its message. Subclasses, such as those of
    JAX and `UnicodeError`, take other arguments."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{place}: {error}")
