"""Formats by name."""

from ._binary import Binary
from ._format import Format
from ._int4 import Int4
from ._int8 import Int8
from ._nf4 import NF4
from ._ternary import Ternary


formats: dict[str, type[Format]] = {
    format.name: format for format in (NF4, Int8, Int4, Ternary, Binary)
}


def as_format(format: Format | str) -> Format:
    """A format from itself, or with its defaults from its name."""
    if isinstance(format, Format):
        return format
    if isinstance(format, str) and format in formats:
        return formats[format]()
    raise ValueError(
        f"format must be one of {sorted(formats)} or an instance of eqquant.Format, "
        f"got {format!r}."
    )
