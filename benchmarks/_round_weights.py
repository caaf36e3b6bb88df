"""Weights as a library rounds them, in its own environment.

    python benchmarks/_round_weights.py NAME FOLDER CHECKPOINT

FOLDER has the weights, and the batches to calibrate on. For each of the library's
formats a file of what the weights become is written to it, and a line of JSON printed.
"""

import json
import pathlib
import sys
import time

import _quantizers
import numpy as np


def read(file: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files}


def main(name: str, folder: pathlib.Path, checkpoint: pathlib.Path) -> None:
    version, formats = _quantizers.find()[name].load()
    weights, batches = (read(folder / f"{of}.npz") for of in ("weights", "batches"))
    numbers = range(len(batches) // 2)
    pairs = [(batches[f"tokens{i}"], batches[f"mask{i}"]) for i in numbers]
    for i, (variant, quantize) in enumerate(formats.items()):
        said = {"variant": variant, "version": version}
        start = time.perf_counter()
        try:
            model = _quantizers.Model(dict(weights), checkpoint, pairs)
            decoded, nbytes = quantize(model)
        except Exception as error:
            short = f"{type(error).__name__}: {error}".splitlines()[0]
            print(json.dumps(said | {"failed": short}), flush=True)
            continue
        said["seconds"] = time.perf_counter() - start
        file = folder / f"{name}-{i}.npz"
        np.savez(file, **decoded)
        print(json.dumps(said | {"file": str(file), "bytes": nbytes}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(pathlib.Path, sys.argv[2:]))
