"""Errors with the place where they occurred."""


def with_place(error: Exception, place: str) -> Exception:
    """Prefix an error with a place. The result is a plain `TypeError` or `ValueError`,
    because subclasses, such as errors of JAX, may take other arguments."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{place}: {error}")
