"""Rows of a printed report: similar arrays are one row, and large ones are first."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any


def grouped(rows: Sequence[Any]) -> list[Any]:
    """Merge similar rows of a report, and sort by bytes."""
    groups: dict[Any, list] = {}
    for row in rows:
        is_plain = row.format is None and len(row.shape) < 2
        pattern = re.sub(r"\d+", "*", row.path)
        same = (pattern, row.shape, row.format, row.axes)
        key = row.reason if is_plain else (*same, row.reason)
        groups.setdefault(key, []).append(row)
    merged = [_merged(members) for members in groups.values()]
    return sorted(merged, key=lambda row: -row.bytes_after)


def _merged(rows: Sequence[Any]) -> Any:
    first = rows[0]
    if len(rows) == 1:
        return first
    patterns = {re.sub(r"\d+", "*", row.path) for row in rows}
    path = patterns.pop() if len(patterns) == 1 else "others"
    shapes = {row.shape for row in rows}
    before, after = (
        sum(getattr(row, name) for row in rows)
        for name in ("bytes_before", "bytes_after")
    )
    elements = sum(8 * row.bytes_after / row.bits for row in rows if row.bits)

    def worst(name, choose):
        values = [getattr(row, name) for row in rows]
        return None if None in values else choose(values)

    return dataclasses.replace(
        first,
        path=f"{path} ({len(rows)} arrays)",
        shape=first.shape if len(shapes) == 1 else (round(elements),),
        bits=8 * after / elements if elements else 0.0,
        bytes_before=before,
        bytes_after=after,
        relative_error=worst("relative_error", max),
        sqnr=worst("sqnr", min),
        output_error=worst("output_error", max),
        rounded_output_error=worst("rounded_output_error", max),
        loss=worst("loss", sum),
    )
