"""JSON from files that may be damaged or malicious."""

import json
from typing import Any


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raise a `ValueError` that starts with `where` for any other value, for a duplicate
    key, and for `NaN` and `Infinity`, which Python's parser accepts although JSON has
    neither.
    """

    def check_unique(pairs):
        unique = dict(pairs)
        if len(unique) != len(pairs):
            keys = [key for key, _ in pairs]
            duplicate = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {duplicate!r} occurs more than once")
        return unique

    def reject(constant):
        raise ValueError(f"{constant} is not valid JSON")

    try:
        # `json.loads` guesses the encoding of bytes, so decode them first.
        parsed = json.loads(
            text.decode("utf-8"), object_pairs_hook=check_unique, parse_constant=reject
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(parsed).__name__}.")
    return parsed


def to_json(value: Any) -> bytes:
    """Write a value as compact JSON. Equal values give equal bytes."""
    compact = (",", ":")
    text = json.dumps(value, separators=compact, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")
