"""Write checkpoints for other libraries. Each library has a file with a subclass of
[`Library`][], which packs one weight. `_write.py` walks through a model, reads every
packed weight back, and writes the files. Imports `files` and `foreign`."""

from ._bitsandbytes import (
    BitsAndBytes as BitsAndBytes,
    write_bitsandbytes as write_bitsandbytes,
)
from ._compressed_tensors import (
    CompressedTensors as CompressedTensors,
    write_compressed_tensors as write_compressed_tensors,
)
from ._floats import Floats as Floats
from ._ggml import to_ggml as to_ggml, type_of as type_of
from ._gguf import write_gguf as write_gguf, write_gguf_like as write_gguf_like
from ._gguf_file import (
    GGUFTensor as GGUFTensor,
    write_gguf_tensors as write_gguf_tensors,
)
from ._gptq import GPTQ as GPTQ, write_gptq as write_gptq
from ._in_tiles import quantize_in_tiles as quantize_in_tiles
from ._library import Library as Library, NotHeld as NotHeld, Packed as Packed
from ._mlx import MLX as MLX, write_mlx as write_mlx
from ._write import (
    check_target as check_target,
    METADATA as METADATA,
    pack_arrays as pack_arrays,
    write_arrays as write_arrays,
    Written as Written,
)
from ._zero_points import quantize_with_zero_points as quantize_with_zero_points
