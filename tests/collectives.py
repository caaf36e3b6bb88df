"""The collectives of a compiled program."""

import math
import re


def collectives(compiled) -> set[tuple[str, str]]:
    """Yield the kind of each collective, and the types of the arrays that it moves."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(", compiled.as_text())
    # Some collectives also carry a counter.
    types = [(kind, re.findall(r"(\w+)\[(\d*)", of)) for of, kind in found]
    return {(kind, t) for kind, of in types for t, n in of if n or len(of) == 1}


def largest_float(compiled) -> int:
    """Return the size of the largest floating-point array on any device."""
    shapes = re.findall(r"(?:f32|bf16|f16|f64)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def num_gathered(compiled) -> int:
    """Return the number of gathered arrays."""
    return len(re.findall(r" all-gather(?:-start)?\(", compiled.as_text()))
