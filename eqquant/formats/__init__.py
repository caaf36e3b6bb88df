"""One small file per format. To add one, see CONTRIBUTING.md."""

from ._binary import Binary as Binary
from ._format import Format as Format, Precision as Precision
from ._int8 import Int8 as Int8
from ._nf4 import NF4 as NF4
from ._registry import as_format as as_format
from ._scales import QuantizedScales as QuantizedScales
from ._ternary import Ternary as Ternary
from ._tpu import TPUKernel as TPUKernel
