"""Time a quantized cache of keys and values, by its capacity.

    python benchmarks/kv_cache.py
    python benchmarks/kv_cache.py --tokens 512 8192 --kv int8

The cache belongs to one layer of `examples/llama`.

- "append" writes the keys and values of one token into a donated cache. Its time should
  not depend on the capacity.
- "attend" computes the attention of one token: two matmuls with the whole cache.
- "error" is the relative error of "attend" with normally distributed keys and values,
  compared with a float32 cache.
"""

import argparse
import functools as ft
import math
import pathlib
import sys
from typing import Any

import eqquant
import jax
import jax.numpy as jnp
from _tables import add_output_options, output, print_table
from _timing import interleaved, machine, median


sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "llama")
)
from cache import Cache  # pyright: ignore[reportMissingImports]


KINDS = ("float32", "bfloat16", "int8", "int4", "nf4", "int4-rotated")


def make(kind: str, heads: int, tokens: int, size: int) -> Cache:
    a, b = jax.random.split(jax.random.key(0))
    keys = jax.random.normal(a, (heads, size, tokens))
    values = jax.random.normal(b, (heads, tokens, size))
    if kind in ("float32", "bfloat16"):
        return Cache(keys.astype(kind), values.astype(kind))
    format, _, rotated = kind.partition("-")
    return eqquant.trees.quantize_cache(
        Cache(keys, values), format, axis=Cache(-2, -1), rotate=bool(rotated)
    )


@ft.partial(jax.jit, donate_argnums=0)
@ft.partial(eqquant.quaxify, on_materialise="error")
def append(cache: Cache, key, value, i) -> Cache:
    return cache.append(key[..., None], value[:, None], None, i)[0]


@jax.jit
@ft.partial(eqquant.quaxify, on_materialise="error")
def attend(cache: Cache, queries):
    size = queries.shape[-1]
    scores = jnp.einsum("hgd,hdt->hgt", queries, cache.keys) / math.sqrt(size)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(queries.dtype)
    return jnp.einsum("hgt,htd->hgd", weights, cache.values)


class Appends:
    """A call that appends to a donated cache and keeps the result."""

    def __init__(self, cache: Cache, heads: int, size: int):
        self.cache, self.row, self.i = cache, jnp.ones((heads, size)), jnp.int32(3)

    def __call__(self) -> Cache:
        self.cache = append(self.cache, self.row, self.row, self.i)
        return self.cache


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 32_768])
    parser.add_argument("--kv", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--heads", type=int, default=4, help="heads of keys")
    parser.add_argument("--group", type=int, default=8, help="queries per key")
    parser.add_argument("--size", type=int, default=64, help="size of a head")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each column")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    with output(options):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    heads, size = options.heads, options.size
    shape = heads, options.group, size
    queries = jax.random.normal(jax.random.key(1), shape)

    caches = {
        (kind, n): make(kind, heads, n, size)
        for kind in options.kv
        for n in options.tokens
    }
    exact = {
        n: attend(make("float32", heads, n, size), queries) for n in options.tokens
    }

    def error(kind: str, n: int) -> float:
        difference = attend(caches[kind, n], queries).astype(jnp.float32) - exact[n]
        return float(jnp.linalg.norm(difference) / jnp.linalg.norm(exact[n]))

    errors = {key: error(*key) for key in caches}
    nbytes = {
        key: eqquant.trees.nbytes(cache) / key[1] for key, cache in caches.items()
    }
    attends: Any = {
        key: ft.partial(attend, cache, queries) for key, cache in caches.items()
    }
    attends = interleaved(attends, seconds=options.seconds)
    appends: Any = {key: Appends(cache, heads, size) for key, cache in caches.items()}
    appends = interleaved(appends, seconds=options.seconds)

    print(f"{machine()}; {heads} heads of {size}, {options.group} queries to each\n")
    table = [
        ["cache", "tokens", "bytes per token", "append, µs", "attend, µs", "error"]
    ]
    for kind, n in caches:
        times = (f"{median(t[kind, n]) * 1e6:,.0f}" for t in (appends, attends))
        shown = f"{errors[kind, n]:.1e}" if errors[kind, n] else "0"
        table.append([kind, f"{n:,}", f"{nbytes[kind, n]:,.0f}", *times, shown])
    print_table(table, options.markdown)


if __name__ == "__main__":
    main()
