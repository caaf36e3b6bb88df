"""Read and write the bytes of tensors in files, whoever wrote the files.

This folder holds safetensors files and their headers, checked against the size of the
file; checkpoints of several files, and tensors split over them; atomic replacement of
files; JSON; and memory. It imports no other folder of `checkpoints`.
"""

from ._beside import copy_others as copy_others
from ._fill import fill as fill, Part as Part
from ._json import parse_object as parse_object, to_json as to_json
from ._manifest import (
    KEY as KEY,
    make_header as make_header,
    Manifest as Manifest,
    Piece as Piece,
    read_manifest as read_manifest,
    Shard as Shard,
    VERSION as VERSION,
)
from ._mapped import MappedFile as MappedFile, release as release
from ._memory import (
    convert as convert,
    empty as empty,
    kept as kept,
    to_jax as to_jax,
    to_numpy as to_numpy,
    with_abstract_arrays as with_abstract_arrays,
)
from ._plain import write_plain as write_plain
from ._replacing import PART as PART, replacing as replacing, sync_folder as sync_folder
from ._safetensors import (
    CHUNK as CHUNK,
    DTYPES as DTYPES,
    MAX_HEADER as MAX_HEADER,
    Path as Path,
    Tensor as Tensor,
    TensorFile as TensorFile,
)
from ._source import (
    INDEX as INDEX,
    index_of as index_of,
    MemorySource as MemorySource,
    read_index as read_index,
    Source as Source,
    SUFFIX as SUFFIX,
)
from ._stream import ShardWriter as ShardWriter
