"""What a compiled program moves between devices."""

import math
import re


def collectives(compiled) -> set[tuple[str, str]]:
    """The kind of each collective, and the types of what it moves: one may move several
    arrays."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(", compiled.as_text())
    # Some have a counter beside what they move.
    types = [(kind, re.findall(r"(\w+)\[(\d*)", of)) for of, kind in found]
    return {(kind, t) for kind, of in types for t, n in of if n or len(of) == 1}


def largest_float(compiled) -> int:
    """How many elements the largest array of floats has that some device holds."""
    shapes = re.findall(r"(?:f32|bf16|f16|f64)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def num_gathered(compiled) -> int:
    """How many arrays are gathered."""
    return len(re.findall(r" all-gather(?:-start)?\(", compiled.as_text()))
