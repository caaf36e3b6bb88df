"""Plan a deployment: does a model in a given format fit on given TPUs?

    python examples/pods.py 70b v5e:4x4 --group 2
    python examples/pods.py 8b v6e:2x4 --batch 64 --length 8192 --weights int8

The example compiles one decode step for a batch of sequences with the real TPU
compiler. It needs no TPU, no weights and no download, little memory, and a few
minutes. It requires libtpu, on Linux: `pip install libtpu`.
"""

import argparse
import pathlib
import sys

import jax


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "llama"))
import ahead
from layout import Layout


def plan(options) -> float:
    """Return the free memory on each device in GiB; negative if the model does not
    fit."""
    split = options.heads * options.group
    mesh = ahead.mesh_of(options.topology, (options.data, options.heads, options.group))
    layout = Layout(mesh)
    config = ahead.config_of(options.model, options.layers, options.vocabulary)
    format = None if options.weights == "bfloat16" else options.weights
    # Shapes, dtypes and shardings of the model after `quantize_tree` and `shard_tree`.
    model = ahead.abstract_model(config, layout, format)
    step, args = ahead.serving(model, layout, options.batch, options.length)
    cache, *_ = args
    print(
        f"{ahead.parameters_of(config) / 1e9:.1f} billion weights in {options.weights} "
        f"over {mesh.size} devices, each layer over {split} of them.\n"
        f"On each device: {ahead.bytes_of(model) / ahead.GIB:.2f} GiB of weights, "
        f"{ahead.bytes_of(cache) / ahead.GIB:.2f} GiB of keys and values of "
        f"{options.batch} sequences of {options.length} tokens."
    )
    memory = ahead.MEMORY[options.topology.split(":")[0]]
    try:
        program = ahead.compile_ahead(
            step, args, layout, lambda step: print(f"... {step}", flush=True)
        )
    except jax.errors.JaxRuntimeError as error:
        needed = ahead.needed(error)
        print(f"It does not fit: {needed:.2f} GiB of {memory} on each device.")
        return memory - needed
    found = program.memory_analysis()
    used = found.argument_size_in_bytes + found.temp_size_in_bytes
    used += found.output_size_in_bytes - found.alias_size_in_bytes
    left = memory - used / ahead.GIB
    kernels = program.as_text().count('custom_call_target="tpu_custom_call"')
    print(
        f"The program runs {kernels} kernels, and takes {used / ahead.GIB:.2f} GiB on "
        f"each device, {found.temp_size_in_bytes / ahead.GIB:.2f} of these for a "
        f"while. {left:.2f} GiB are left."
    )
    return left


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", choices=ahead.MODELS, help="Plan for this size of Llama 3.1."
    )
    parser.add_argument(
        "topology",
        help="Plan for these chips, for example v5e:4x4, v6e:16x16 or v5p:2x2x2.",
    )
    parser.add_argument(
        "--data",
        type=int,
        default=1,
        help="Split the batch into this many parts (default: %(default)s).",
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=8,
        help="Split heads and hidden units of each layer into this many parts "
        "(default: %(default)s).",
    )
    parser.add_argument(
        "--group",
        type=int,
        default=1,
        help="Split each of these parts again, into this many parts (default: "
        "%(default)s).",
    )
    parser.add_argument(
        "--weights",
        default="nf4",
        help="Store weights in this format, or in bfloat16 (default: %(default)s).",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        help="Serve this many sequences at once (default: %(default)s).",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=4096,
        help="Reserve this many tokens for each sequence (default: %(default)s).",
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="Plan for this number of layers. By default, the model has its own "
        "number.",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=128_256,
        help="Plan for a vocabulary of this size (default: %(default)s).",
    )
    return plan(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main() < 0)
