"""JSON from a file that may be damaged, or made to mislead."""

import json
from typing import Any


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """An object; a `ValueError` that says `where` for anything else, for a key that is
    there twice, and for what is no JSON although Python reads it."""

    def once(pairs):
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice!r} is there twice")
        return found

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    try:
        # Not by `json.loads`, which guesses the encoding of bytes.
        found = json.loads(
            text.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(found).__name__}.")
    return found


def to_json(value: Any) -> bytes:
    """The same value always as the same bytes."""
    compact = (",", ":")
    text = json.dumps(value, separators=compact, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")
