"""Weights as a library rounds them, in its own environment.

    python benchmarks/_round_weights.py NAME WEIGHTS.npz FOLDER

For each of its formats a file of what the weights become is written to FOLDER, and a
line of JSON printed.
"""

import json
import pathlib
import sys

import _quantizers
import numpy as np


def main(name: str, weights: str, folder: str) -> None:
    version, formats = _quantizers.find()[name].load()
    with np.load(weights) as file:
        arrays = {path: file[path] for path in file.files}
    for i, (variant, rounded) in enumerate(formats.items()):
        said = {"variant": variant, "version": version}
        try:
            results = {path: rounded(w) for path, w in arrays.items()}
        except Exception as error:
            short = f"{type(error).__name__}: {error}".splitlines()[0]
            print(json.dumps(said | {"failed": short}), flush=True)
            continue
        file = pathlib.Path(folder) / f"{name}-{i}.npz"
        np.savez(file, **{path: decoded for path, (decoded, _) in results.items()})
        nbytes = sum(size for _, size in results.values())
        print(json.dumps(said | {"file": str(file), "bytes": nbytes}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
