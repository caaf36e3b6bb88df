"""Products with quantized weights on CPUs: native kernels.

The kernels decode codes in registers, by a table lookup, and multiply at once. The
library, `src/`, is plain C++. XLA calls it through its foreign function interface and
lends it its threads. It receives the levels of a format as a table, and contains no
formats.
"""

from .._int8 import round_int8
from ._choose import cpu_of, describe, KERNELS, NativeKernel, rule_of, why_unsupported
from ._encode import encode, encodes
from ._library import load, status
from ._relayout import find_layouts, Layout, relayout
from ._rotate import rotate, rotates
from ._round import round_rows, round_trip, rounds
from ._rules import describe_limits, describe_rules, limits, RULES
from ._search import search, searches
from ._transpose import transposed
