"""Convert formats to JSON and back. A file only names a format; the class must be known
to the caller."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from beartype.door import is_bearable

from ...formats import every_format as formats_by_name, Format


Known = Mapping[str, type[Format]]


def known_formats(formats: Sequence[type[Format]], caller: str) -> Known:
    """Return the formats of eqquant and the user's `formats`, by name."""
    known = dict(formats_by_name)
    for cls in formats:
        if not isinstance(cls, type) or not issubclass(cls, Format):
            raise TypeError(
                f"{caller}: formats must be subclasses of "
                f"eqquant.formats.Format, got {cls!r}."
            )
        if known.setdefault(cls.name, cls) is not cls:
            raise ValueError(
                f"{caller}: formats: two classes have the name {cls.name!r}."
            )
    return known


def format_to_json(format: Format) -> dict[str, Any]:
    """Convert a format to JSON for [`format_from_json`][]."""
    cls = type(format)
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or formats_by_name.get(name, cls) is not cls:
        raise ValueError(
            f"{format!r} cannot be saved: another class has the name {name!r}. Give it "
            "a unique `name`."
        )
    fields = {f.name: getattr(format, f.name) for f in dataclasses.fields(format)}
    try:
        written = {
            "name": name,
            "fields": {key: _value_to_json(value) for key, value in fields.items()},
        }
        is_equal = format_from_json(written, {name: cls}) == format
    except (TypeError, ValueError) as error:
        raise ValueError(f"{format!r} cannot be saved: {error}") from error
    if not is_equal:
        raise ValueError(
            f"{format!r} cannot be saved: a format with the same fields differs."
        )
    return written


def format_from_json(written: Any, known: Known) -> Format:
    """Build a format from the JSON of [`format_to_json`][]."""
    if not isinstance(written, dict) or written.keys() != {"name", "fields"}:
        raise ValueError(f"a format must have a name and fields, got {written!r}.")
    name, fields = written["name"], written["fields"]
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"format must be one of {sorted(known)}, got {name!r}. If it is your own "
            "format, pass its class in `formats=[...]`."
        )
    return _make(known[name], fields)


def _value_to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, tuple):
        return [_value_to_json(x) for x in value]
    raise TypeError(
        f"a field is {value!r}. Fields must be numbers, strings, dtypes, None, or "
        "tuples of these."
    )


def _value_from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value_from_json(x) for x in value)
    if isinstance(value, dict):
        raise ValueError(f"a field cannot be {value!r}.")
    return value


def _make(cls: type, fields: Any) -> Any:
    """Build a dataclass. Check that each field has its declared type."""
    hints = typing.get_type_hints(cls)
    declared = {field.name for field in dataclasses.fields(cls) if field.init}
    if not isinstance(fields, dict) or not fields.keys() <= declared:
        raise ValueError(
            f"{cls.__name__} has the fields {sorted(declared)}, got {fields!r}."
        )
    values = {name: _value_from_json(value) for name, value in fields.items()}
    for name, value in values.items():
        if not is_bearable(value, hints[name]):
            raise ValueError(f"{cls.__name__}: {name} cannot be {value!r}.")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error)) from error
