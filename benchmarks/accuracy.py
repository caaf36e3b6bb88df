"""A whole model in few bits, beside other libraries: accuracy and bytes.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --quantizers llama_cpp --bits 4.35

The model is that of `examples/minilm.py`. Each library is installed into an environment
of its own, in a folder that is kept (`--cache`); what cannot be installed is named. It
rounds every weight but one of 768 elements, in each of its formats. What these stand
for then takes the place of the weights, so all are evaluated alike. Bytes are those of
the whole model. eqquant uses calibration data, as in `examples/calibrate_minilm.py`;
the formats of the others that are compared do not.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import _quantizers
import eqquant
import jax
import numpy as np
from _environments import CACHE, install, last_line, run
from _examples import calibrate_minilm, minilm


HERE = pathlib.Path(__file__).resolve().parent
COLUMNS = {key: calibrate_minilm.COLUMNS[key] for key in ("format", "bytes", "bits")}
COLUMNS |= {k: calibrate_minilm.COLUMNS[k] for k in ("mean", "top 10")}


def path_of(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def weights_of(model) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {
        path_of(path): np.asarray(leaf)
        for path, leaf in leaves
        if getattr(leaf, "ndim", 0) == 2 and "token_types" not in path_of(path)
    }


def with_weights(model, weights):
    def new(path, leaf):
        name = path_of(path)
        return jax.numpy.asarray(weights[name]) if name in weights else leaf

    return jax.tree_util.tree_map_with_path(new, model)


def rounded_by(name: str, file: pathlib.Path, cache: pathlib.Path) -> list[dict]:
    """What each format of a library makes of the weights in a file."""
    quantizer = _quantizers.find()[name]
    python = install(quantizer.environment, quantizer.packages, cache)
    ran = run(
        python,
        str(HERE / "_round_weights.py"),
        *(name, str(file), str(file.parent)),
        environment={},
        capture_output=True,
        timeout=1800,
    )
    if ran.returncode:
        raise RuntimeError(f"fails: {last_line(ran.stderr)}")
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(_quantizers.find())
    parser.add_argument("--quantizers", nargs="*", choices=known, default=known)
    parser.add_argument("--bits", type=float, nargs="*", default=calibrate_minilm.BITS)
    parser.add_argument("--sentences", type=int, default=480)
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    options = parser.parse_args()

    model = minilm.load_model()
    sentences = minilm.tokenize(minilm.read_sentences())
    expected = minilm.embed_all(model, *sentences)
    weights = weights_of(model)
    rest = eqquant.tree_nbytes(model) - sum(w.nbytes for w in weights.values())

    rows, missing = [], []

    def add(name: str, quantized, nbytes: int | None = None) -> None:
        embeddings = minilm.embed_all(quantized, *sentences)
        row = minilm.compare(name, quantized, model, embeddings, expected)
        if nbytes is not None:
            row |= {"bytes": nbytes, "bits": row["bits"] * nbytes / row["bytes"]}
        rows.append(row)
        print(f"{name}: mean cosine {row['mean']:.4f}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "weights.npz"
        np.savez(file, **weights)
        for name in options.quantizers:
            try:
                results = rounded_by(name, file, options.cache)
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                missing.append(f"{name}: {problem}")
                continue
            for result in results:
                title = f"{result['version']}: {result['variant']}"
                if "failed" in result:
                    missing.append(f"{title}: {result['failed']}")
                    continue
                with np.load(result["file"]) as decoded:
                    add(title, with_weights(model, decoded), rest + result["bytes"])
    if options.bits:
        stats = calibrate_minilm.calibrate(model, options.sentences)
        ours = calibrate_minilm.budgets(options.bits, model, stats)
        for bits, (quantized, _) in zip(options.bits, ours, strict=True):
            add(f"eqquant, at most {bits} bits", quantized)

    rows.sort(key=lambda row: -row["bytes"])
    minilm.print_table(rows, COLUMNS)
    for line in missing:
        print(f"NOT MEASURED: {line}")


if __name__ == "__main__":
    main()
