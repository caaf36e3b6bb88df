"""What straight-through rounding of weights takes.

    python benchmarks/rounding.py                   # its time, against a plain copy
    python benchmarks/rounding.py --chips v5e v6e   # the bytes that it adds on a TPU

Bytes are for each weight of 2048 x 2048, in what the value and the gradients of a layer
take for 64 tokens, by the compiler's own count; one read and one write of a float32 are
8. It needs libtpu, but no TPU. There are several devices then, as XLA counts a loop
once, and with one device there are loops.
"""

import argparse
import functools as ft

import eqquant
import jax
import jax.numpy as jnp
from _timing import interleaved, machine, median
from eqquant.debug import compile_for_tpu


FORMATS = ("int8", "nf4", "ternary", "binary")


def rounded(format: str):
    return ft.partial(eqquant.straight_through, format=format, check_finite=False)


def print_times() -> None:
    weight = jax.random.normal(jax.random.key(0), (4096, 4096))
    print(f"{machine()}; 4096 x 4096 float32")
    # What has to be computed cannot be a copy within the memory, or none at all.
    compiled = {"copy": jax.jit(lambda weight: weight + 1)}
    compiled |= {format: jax.jit(rounded(format)) for format in FORMATS}
    runs = {name: ft.partial(fn, weight) for name, fn in compiled.items()}
    times = interleaved(runs, seconds=5)
    for name, each in times.items():
        ratio = median(each) / median(times["copy"])
        print(f"{name:<10}{median(each) * 1e3:>8.1f} ms{ratio:>7.2f} of a copy")


def bytes_of_step(format: str | None, chip: str) -> float:
    @ft.partial(jax.value_and_grad, argnums=(0, 1))
    def step(weight, x):
        weight = weight if format is None else rounded(format)(weight)
        return jnp.sum((x @ weight.T) ** 2)

    shapes = [jax.ShapeDtypeStruct((n, 2048), jnp.float32) for n in (2048, 64)]
    compiled = compile_for_tpu(step, *shapes, chip=chip)
    return compiled.cost_analysis()["bytes accessed"] / 2048**2


def print_bytes(chips: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"{'':<10}" + "".join(f"{chip:>8}" for chip in chips))
    for format in FORMATS:
        added = [bytes_of_step(format, c) - bytes_of_step(None, c) for c in chips]
        print(f"{format:<10}" + "".join(f"{bytes_:>8.1f}" for bytes_ in added))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=[], help="of TPUs")
    options = parser.parse_args()
    if options.chips:
        print_bytes(options.chips)
    else:
        print_times()


if __name__ == "__main__":
    main()
