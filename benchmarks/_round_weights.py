"""Quantize and dequantize weights with another library, in its own environment.

    python benchmarks/_round_weights.py NAME FOLDER CHECKPOINT [VARIANT ...]

FOLDER contains the weights and the calibration batches. For each named variant of the
library, or for all, the script writes the dequantized weights to a file there and
prints a line of JSON.
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


def main(
    name: str, folder: pathlib.Path, checkpoint: pathlib.Path, variants: list[str]
) -> None:
    version, formats = _quantizers.find()[name].load()
    formats = {v: formats[v] for v in variants or formats}
    weights, batches = (read(folder / f"{part}.npz") for part in ("weights", "batches"))
    numbers = range(len(batches) // 2)
    pairs = [(batches[f"tokens{i}"], batches[f"mask{i}"]) for i in numbers]
    for i, (variant, quantize) in enumerate(formats.items()):
        entry = {"variant": variant, "version": version}
        start = time.perf_counter()
        try:
            model = _quantizers.Model(dict(weights), checkpoint, pairs)
            decoded, nbytes = quantize(model)
        except Exception as error:
            short = f"{type(error).__name__}: {error}".splitlines()[0]
            print(json.dumps(entry | {"failed": short}), flush=True)
            continue
        entry["seconds"] = time.perf_counter() - start
        file = folder / f"{name}-{i}.npz"
        np.savez(file, **decoded)
        print(json.dumps(entry | {"file": str(file), "bytes": nbytes}), flush=True)


if __name__ == "__main__":
    name, folder, checkpoint, *variants = sys.argv[1:]
    main(name, pathlib.Path(folder), pathlib.Path(checkpoint), variants)
