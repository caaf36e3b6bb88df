"""Check that the parts of an array fit together, and which classes a file may contain.

Parts from a file may be arbitrary. A product of parts that do not fit would read out of
bounds.
"""

import collections
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...arrays import ImplicitArray, quantized_arrays, stored_classes
from ...formats import (
    Float8Scales,
    Format,
    FourBitScales,
    IntegerScales,
    num_bytes,
    planes_of,
    PowerOfTwoScales,
    problems_of_scales,
    QuantizedOffsets,
    QuantizedScales,
    unpack,
)
from ._processes import local_parts


_scales = (QuantizedScales, QuantizedOffsets, PowerOfTwoScales, Float8Scales)
_scales += (IntegerScales, FourBitScales)
# Classes that a file may contain, by name.
CLASSES: collections.ChainMap[str, type] = collections.ChainMap(
    stored_classes, {cls.__name__: cls for cls in _scales}
)
_chunk = 2**20  # Bytes of codes that are checked at once.


def types_of_part(cls: type, field: str) -> tuple[type, ...]:
    """Return the classes, other than arrays, that a part of a class may have."""
    return cls.part_types.get(field, ()) if issubclass(cls, ImplicitArray) else ()


def check_fit(array: Any) -> None:
    """Raise a `ValueError` if shapes and dtypes of the parts do not fit. The parts may
    be abstract."""
    # The first problem raises. So each check may rely on the checks before it.
    for problem in _problems(array):
        raise ValueError(str(problem))


def _problems(array: Any) -> Iterator[Any]:
    if isinstance(array, ImplicitArray):
        return array.problems()
    return problems_of_scales(array)


def check_codes(array: Any) -> None:
    """Raise a `ValueError` if codes are not valid in their format. Scales may have any
    value, including NaN."""
    for q in quantized_arrays(array):
        if q.format.unused_codes:
            for codes in local_parts(q.codes):
                _check_codes(codes, q.format)


def _check_codes(codes: np.ndarray, format: Format) -> None:
    bits, mask = format.bits, 2**format.code_bits - 1
    unused = {code & mask for code in format.unused_codes}
    flat = codes.reshape(-1).view(np.uint8)
    step = _chunk
    if 8 % bits:  # Each code spans two bytes.
        group = num_bytes(format.group, bits)
        step = max(step // group, 1) * group
        table = np.array([code in unused for code in range(mask + 1)])
        read = lambda part: np.asarray(unpack(jnp.asarray(part), bits, format.group))
    else:  # The table covers all bytes that contain an unused code.
        shifts = range(0, planes_of(bits) * bits, bits)
        is_invalid = lambda byte: any(byte >> s & mask in unused for s in shifts)
        table = np.array([is_invalid(byte) for byte in range(256)])
        read = lambda part: part
    for start in range(0, flat.size, step):
        if table[read(flat[start : start + step])].any():
            raise ValueError(
                f"codes must not be {sorted(format.unused_codes)} in {format!r}."
            )
