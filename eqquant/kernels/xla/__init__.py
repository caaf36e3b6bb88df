"""Products with quantized weights in plain XLA, for any platform."""

from .._int8 import round_int8 as round_int8
from ._dot import dot as dot
from ._recipes import (
    choose_recipe as choose_recipe,
    describe as describe,
    longest_int8_sum as longest_int8_sum,
)
from ._scale_gradient import scale_gradient as scale_gradient
