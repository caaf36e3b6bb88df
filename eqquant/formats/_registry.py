"""Formats by name."""

import difflib
from typing import Any

from .._jax import is_class_of, wrong
from ._binary import Binary
from ._codebook import Codebook, NF2, NF3
from ._contract import check_contract
from ._format import Format
from ._fp4 import MXFP4, NVFP4
from ._fp8 import FP8
from ._int8 import Int8
from ._integers import Int2, Int3, Int4, Int5, Int6
from ._nf4 import NF4
from ._ternary import DenseTernary, Ternary
from ._trellis import Trellis


# Formats with default arguments.
formats: dict[str, type[Format]] = {
    format.name: format
    for format in (
        *(NF4, NF3, NF2, FP8, MXFP4, NVFP4),
        *(Int8, Int6, Int5, Int4, Int3, Int2, Ternary, Binary),
    )
}
_others = (Codebook, DenseTernary, Trellis)
every_format: dict[str, type[Format]] = {
    **formats,
    **{format.name: format for format in _others},
}
_with_bits = {f"trellis{bits}": Trellis(bits=bits) for bits in (2, 3, 4)}
format_names = (*formats, *_with_bits)


def as_format(format: Any, caller: str = "") -> Format:
    """Return a format, given itself or its name. Errors start with `caller`."""
    if isinstance(format, Format):
        check_contract(format)
        return format
    if isinstance(format, str) and format in formats:
        return formats[format]()
    if isinstance(format, str) and format in _with_bits:
        return _with_bits[format]
    known = sorted(format_names)
    names = ", ".join(map(repr, known))
    accepted = f"a format such as `eqquant.NF4()`, or one of the names {names}"
    advice = ""
    if is_class_of(format, Format):
        advice = f"Did you mean `{format.__name__}()`?"
    elif isinstance(format, str):
        close = difflib.get_close_matches(format.lower(), known, 1)
        advice = f"Did you mean {close[0]!r}?" if close else ""
    error = ValueError if isinstance(format, str) else TypeError
    raise error(wrong(caller, "format", format, accepted, advice))
