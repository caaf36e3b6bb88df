"""Read and write the bytes of tensors in files, whoever wrote the files.

This folder holds safetensors files and their headers, checked against the size of the
file; checkpoints of several files, and tensors split over them; atomic replacement of
files; JSON; and memory. It imports no other folder of `checkpoints`.
"""

from ._beside import copy_others
from ._fill import cannot_concatenate, fill, Part
from ._json import parse_object, to_json
from ._manifest import KEY, make_header, Manifest, Piece, read_manifest, Shard, VERSION
from ._mapped import MappedFile, release
from ._memory import convert, empty, kept, to_jax, to_numpy, with_abstract_arrays
from ._pages import SharedPages
from ._plain import write_plain
from ._replacing import PART, replacing, sync_folder
from ._safetensors import CHUNK, DTYPES, MAX_HEADER, Path, Tensor, TensorFile
from ._source import INDEX, index_of, MemorySource, read_index, Source, SUFFIX
from ._stream import check_shard_size, ShardWriter
