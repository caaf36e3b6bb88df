"""Write checkpoints for other libraries. Each library has a file with a subclass of
[`Library`][], which packs one weight. `_write.py` walks through a model, reads every
packed weight back, and writes the files. Imports `files` and `foreign`."""

from ._bitsandbytes import write_bitsandbytes as write_bitsandbytes
from ._compressed_tensors import write_compressed_tensors as write_compressed_tensors
from ._gguf import write_gguf as write_gguf
from ._gguf_file import (
    GGUFTensor as GGUFTensor,
    write_gguf_tensors as write_gguf_tensors,
)
from ._gptq import write_gptq as write_gptq
from ._mlx import write_mlx as write_mlx
from ._zero_points import quantize_with_zero_points as quantize_with_zero_points
