"""Products with quantized weights on CPUs: native kernels.

The kernels decode codes in registers, by a table lookup, and multiply at once. The
library, `src/`, is plain C++. XLA calls it through its foreign function interface and
lends it its threads. It receives the levels of a format as a table, and contains no
formats.
"""

from .._int8 import round_int8 as round_int8
from ._choose import (
    cpu_of as cpu_of,
    describe as describe,
    KERNELS as KERNELS,
    rule_of as rule_of,
    why_unsupported as why_unsupported,
)
from ._encode import encode as encode, encodes as encodes
from ._library import load as load, status as status
from ._round import round_trip as round_trip, rounds as rounds
from ._rules import describe_rules as describe_rules, RULES as RULES
from ._search import search as search, searches as searches
from ._transpose import transposed as transposed
