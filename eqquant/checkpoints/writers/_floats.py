"""Write plain floats, which every library reads."""

import numpy as np

from ._library import Library, Packed


class Floats(Library):
    """Plain safetensors: quantized weights are decoded."""

    name = "safetensors"

    def pack(self, name, q):
        array = np.asarray(q.dequantize())
        return Packed({name: array}, array.dtype.name)
