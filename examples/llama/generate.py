"""Generate text with a model from a folder or a GGUF file, quantized while it loads.

python examples/llama/generate.py FOLDER "Once upon a time" --format nf4 --kv int8
python examples/llama/generate.py FOLDER "Who are you?" --chat --temperature 0
python examples/llama/generate.py FOLDER "A tale" --adapters ADAPTERS
python examples/llama/generate.py MODEL.gguf "Who are you?" --chat
python examples/llama/generate.py MODEL.gguf --chat

Without a prompt, `--chat` reads questions from the terminal.
Without `--format`, the weights of a GGUF file keep their formats.
"""

import argparse
import functools as ft
import itertools
import pathlib
import resource
import sys
import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from chat import chat
from joined import join
from load import can_stack, load_in, Model, open_model
from lora import load_adapters
from model import Cache, Caches, Decoder, empty_cache
from program_cache import (
    keep_programs,
    release_freed,
    short_turns,
    without_collections,
)
from sampling import Sampling
from text import Text
from tokenizers.decoders import DecodeStream


FORMATS = ["float32", "bfloat16", "int8", "fp8", "nf4", "mxfp4", "nvfp4", "int4"]
FORMATS += ["nf3", "int3", "nf2", "int2", "ternary", "binary"]
# A prompt is cut into pieces of these lengths, and the last piece is padded. This
# bounds the number of compiled programs.
PIECES = (512, 128, 32)


def quantize_cache(
    cache: Caches,
    format: eqquant.formats.Format | str,
    rotate: bool = False,
    window: int | tuple[int, ...] = 0,
    longest: int = 1,
) -> Caches:
    """Quantize a cache with separate scales for each token, so that tokens can be
    appended, at most `longest` at once. Layers with a window get a ring buffer."""
    axes = Cache(-2, -1)  # Keys are columns.
    axis = tuple(axes for _ in cache) if isinstance(cache, tuple) else axes
    options: dict[str, Any] = {"window": window, "longest": longest}
    return eqquant.trees.quantize_cache(
        cache, format, axis=axis, rotate=rotate, **options
    )


def windows_of(model: Decoder) -> int | tuple[int, ...]:
    """Return the window of each cache of `empty_cache`, or 0 if all tokens are seen."""
    config = model.config
    windows = tuple((config.window or 0) * is_local for is_local in config.local)
    windows = windows or (0,) * config.layers
    if isinstance(model.layers, tuple):
        return windows
    kinds = sorted({*windows})  # Global layers are first.
    return kinds[0] if len(kinds) == 1 else tuple(kinds)


class Generator:
    """A model with a cache of keys and values.

    **Arguments:**

    - `model`: as `load_model` returns it, quantized or not. If it is abstract, programs
        can be compiled, and `put` provides the weights.
    - `capacity`: the largest number of tokens, including the prompt.
    - `kv`: the format of the cache; `None` for the dtype of activations.
    - `rotate`: whether to rotate a quantized cache.
    """

    def __init__(
        self,
        model: Decoder,
        capacity: int,
        kv: eqquant.formats.Format | str | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        rotate: bool = False,
    ):
        self.capacity = -(-capacity // PIECES[-1]) * PIECES[-1]
        self._kv, self._rotate = kv, rotate
        choose = sampling or Sampling()
        self._seed = np.uint32(seed % 2**32)
        arrays, static = eqx.partition(join(model), _is_array)
        # JAX flattens a list fastest, and this happens for each token.
        self._arrays, treedef = jax.tree.flatten(arrays)
        self._treedef = treedef
        self._skeleton = eqx.combine(jax.tree.map(_abstract, arrays), static)
        self._dtype = model.norm.weight.dtype
        # The window of ring buffers, or 0 without them.
        self._window = max(np.ravel(windows_of(model))) if kv else 0

        @ft.partial(eqquant.quaxify, on_materialise="error")
        def extend(model, cache, tokens, start, last, seed):
            """Append tokens, and return the token that follows position `last`."""
            hidden, cache = model.extend(tokens, cache, start)
            hidden = jax.lax.dynamic_slice_in_dim(hidden, last, 1, 1)
            logits = model.logits(hidden)[:, 0]
            key = jax.random.fold_in(jax.random.key(seed), start + last)
            return choose(logits, key)[:, None], cache

        def step(arrays, parts, *args):
            # `quaxify` needs quantized arrays, rather than their parts.
            model = eqx.combine(jax.tree.unflatten(treedef, arrays), static)
            cache = jax.tree.unflatten(self._cache_treedef, parts)
            token, cache = extend(model, cache, *args)
            return token, jax.tree.leaves(cache)

        self._step = jax.jit(step, donate_argnums=1)
        self._programs: dict[int, Future] = {}  # By the number of tokens.
        # Python traces programs one after the other. Then they compile side by side.
        self._tracer, self._compilers = ThreadPoolExecutor(1), ThreadPoolExecutor()
        self.seconds_compiling = 0.0  # Without the time in which other work was done.
        # XLA would compile a program that quantizes zeros.
        zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype))
        cache = jax.tree.map(zeros, eqx.filter_eval_shape(self._empty))
        self._cache, self._cache_treedef = jax.tree.flatten(cache)
        self._cached: list[int] = []  # The tokens whose keys and values are cached.
        self._oldest = 0  # The position of the first token that ring buffers have.

    @property
    def cache(self):
        """The keys and values of the tokens so far."""
        return jax.tree.unflatten(self._cache_treedef, self._cache)

    def put(self, model: Decoder) -> None:
        """Take the weights of a model instead of their shapes."""
        arrays, treedef = jax.tree.flatten(eqx.filter(join(model), _is_array))
        if treedef != self._treedef or [*map(_abstract, arrays)] != [
            *map(_abstract, self._arrays)
        ]:
            raise ValueError("The model has other formats or shapes than expected.")
        self._arrays = arrays

    def _empty(self):
        is_float = self._kv is None
        in_pieces = is_float and jax.default_backend() == "cpu"
        # XLA:CPU would convert a whole cache of shorter floats for each new token.
        dtype = jnp.float32 if in_pieces else self._dtype
        reads = "pieces" if in_pieces else "slices"
        cache = empty_cache(self._skeleton, 1, self.capacity, dtype, reads)
        if is_float:
            return cache
        windows = windows_of(self._skeleton)
        return quantize_cache(cache, self._kv, self._rotate, windows, PIECES[0])

    def _run(self, tokens: Any, start: int, last: int) -> jax.Array:
        """Append tokens `(1, length)`, and return the next token `(1, 1)`. Tokens after
        position `start + last` are padding. The caller adds the others to `_cached`."""
        length = tokens.shape[1]
        del self._cached[start:]
        kept = self._window + PIECES[0] - 1
        overwritten = start + length - kept if self._window else 0
        self._oldest = max(self._oldest if start else 0, overwritten)
        numbers = np.int32(start), np.int32(last), self._seed
        program = self._program(length)
        token, self._cache = program(self._arrays, self._cache, tokens, *numbers)
        return token

    def _program(self, length: int) -> jax.stages.Compiled:
        """Return the program that appends `length` tokens, when it is compiled."""
        begin = time.perf_counter()
        self._start_compiling(length)
        program = self._programs[length].result()
        self.seconds_compiling += time.perf_counter() - begin
        return program

    def _start_compiling(self, length: int, after: Future | None = None) -> None:
        """Start to trace and compile a program, if possible when `after` is done."""
        if length in self._programs:
            return
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        args = self._arrays, self._cache, tokens, np.int32(0), np.int32(0), self._seed

        def lower(args):
            if after is not None:
                wait([after], timeout=1)
            return self._step.trace(*args).lower()

        lowered = self._tracer.submit(lower, jax.tree.map(_abstract, args))
        compile = lambda: release_freed(lowered.result().compile())
        self._programs[length] = self._compilers.submit(compile)

    def compile(self, prompt_length: int) -> None:
        """Compile the programs for a prompt of this length and for each token, side by
        side."""
        self.start_compiling(prompt_length)
        for length in self._programs:
            self._program(length)

    def start_compiling(
        self, prompt_length: int, loading: Future | None = None
    ) -> None:
        """Compile programs like `compile`, in other threads.

        Only one thread of Python runs at a time. So the program for each token is
        traced after `loading`, or a second after the program for the prompt.
        """
        pieces = {piece for _, piece, _ in self._pieces(prompt_length)}
        for length in sorted(pieces, reverse=True):
            self._start_compiling(length)
        self._start_compiling(1, loading)

    def _pieces(self, length: int, start: int = 0) -> list[tuple[int, int, int]]:
        """Return the start, the padded length and the length of each piece of a
        prompt, after the first `start` tokens."""
        pieces = []
        while start < length:
            left = length - start
            room = [p for p in PIECES if start + p <= self.capacity]
            padded = min((p for p in room if p >= left), default=room[0])
            pieces.append((start, padded, min(left, padded)))
            start += padded
        return pieces

    def _reused(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens at the start of a prompt that are in the cache:
        a multiple of the smallest piece, so that all pieces fit. The next token needs
        the tokens of its window."""
        pairs = zip(prompt[:-1], self._cached, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        reused = len(list(same)) // PIECES[-1] * PIECES[-1]
        is_whole = not self._oldest or reused - self._window + 1 >= self._oldest
        return reused if is_whole else 0

    def prefill(self, prompt: Sequence[int]) -> int:
        """Return the first token after a prompt. Tokens that are already in the cache,
        for example earlier messages of a chat, are not computed again."""
        if not prompt:
            raise ValueError("The prompt has no tokens.")
        if len(prompt) >= self.capacity:
            raise ValueError(
                f"The prompt has {len(prompt)} tokens, but the capacity is "
                f"{self.capacity - 1}."
            )
        token = np.zeros((1, 1), np.int32)
        for start, padded, length in self._pieces(len(prompt), self._reused(prompt)):
            # Later tokens overwrite the entries of the padding.
            piece = np.zeros((1, padded), np.int32)
            piece[0, :length] = prompt[start : start + length]
            token = self._run(piece, start, length - 1)
            self._cached += prompt[start : start + length]
        return _first(token)

    def decode(self, token: int, start: int) -> Iterator[int]:
        """Yield tokens after the token at position `start`, up to the capacity.

        The computation of the next token starts before a token is yielded, so it does
        not wait for Python or the caller. If the caller stops, its result is unused.
        """
        if start >= self.capacity:
            return
        found = self._run(np.full((1, 1), token, np.int32), start, 0)
        self._cached.append(token)
        for position in range(start + 1, self.capacity):
            following = self._run(found, position, 0)
            token = _first(found)
            self._cached.append(token)
            yield token
            found = following
        yield _first(found)

    def __call__(
        self, prompt: Sequence[int], stop: Set[int] = frozenset()
    ) -> Iterator[int]:
        """Yield the tokens after a prompt, up to a token in `stop`."""
        token = self.prefill(prompt)
        rest = self.decode(token, len(prompt))
        while token not in stop:
            yield token
            try:
                token = next(rest)
            except StopIteration:
                return


def _first(tokens: jax.Array | np.ndarray) -> int:
    """Return the first of several tokens. XLA would compile a program for an index."""
    return int(np.asarray(tokens)[0, 0])


def _is_array(x) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)


def _abstract(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def generate(generator: Generator, text: Text, prompt: list[int], longest: int) -> dict:
    """Print text while it is generated. Return the durations in seconds."""
    stream = DecodeStream(skip_special_tokens=True)
    # Without the durations of compilation.
    clock = lambda: time.perf_counter() - generator.seconds_compiling
    begin = clock()
    first, count = None, 0
    for token in generator(prompt, text.stop):
        count += 1
        first = first or clock()
        if piece := stream.step(text.tokenizer, token):
            print(piece, end="", flush=True)
        if count == longest:
            break
    end = clock()
    print()
    first = first or end
    return {"prefill": first - begin, "decode": end - first, "tokens": count}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "model", type=pathlib.Path, help="Read a Hugging Face folder, or a GGUF file."
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        help="Continue this text or, with --chat, answer this message. Without it, "
        "--chat starts a chat.",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="Quantize the weights to this format. The default is nf4 for folders, "
        "and the format of the file for GGUF.",
    )
    parser.add_argument(
        "--kv",
        choices=["float", "int8", "int4", "int4-rotated", "nf4", "nf4-rotated"],
        default="int8",
        help="Store keys and values in this format (default: %(default)s).",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        help="Generate at most this many tokens (default: %(default)s).",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="Sample at this temperature. With 0, take the most probable token "
        "(default: %(default)s).",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="Sample from this many tokens. With 0, from all (default: %(default)s).",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="Sample from the most probable tokens with this total probability "
        "(default: %(default)s).",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Sample with this seed (default: %(default)s).",
    )
    parser.add_argument(
        "--stop",
        nargs="+",
        default=[],
        help="End the text at these tokens. By default, the model ends it.",
    )
    parser.add_argument(
        "--chat", action="store_true", help="Use the chat template of the model."
    )
    parser.add_argument(
        "--system",
        help="Begin a chat with this system message. By default, there is none.",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=1024,
        help="Keep this many tokens of an interactive chat (default: %(default)s).",
    )
    parser.add_argument(
        "--adapters",
        type=pathlib.Path,
        help="Add the adapters in this folder, which finetune.py wrote. By default, "
        "add none.",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="Keep layers apart, which takes longer to compile.",
    )
    parser.add_argument(
        "--no-program-cache",
        action="store_true",
        help="Compile all programs. By default, compiled programs are kept in the "
        "user's cache folder.",
    )
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"--tokens must be 1 or more, got {options.tokens}")
    if options.prompt is None and not options.chat:
        parser.error("a prompt is required without --chat")
    if options.context <= options.tokens:
        parser.error("--context must be more than --tokens")
    if options.apart and options.adapters:
        parser.error("--apart cannot be combined with --adapters")
    if options.system and not options.chat:
        parser.error("--system requires --chat")
    return options


def load(model: Model, options, abstract: bool = False) -> Decoder:
    dtype = jnp.bfloat16 if options.format == "bfloat16" else jnp.float32
    formats = {name: None if "float" in name else name for name in FORMATS}
    how: dict[str, Any] = {"dtype": dtype, "abstract": abstract}
    is_kept = options.format is None
    if options.apart or (is_kept and options.adapters and not can_stack(model)):
        how["stacked"] = False  # Adapters have names for layers.
    how["joined"] = not options.adapters
    loaded = load_in(model, options.format, formats, **how)
    if options.adapters is not None:
        loaded = load_adapters(options.adapters, loaded, model.kind)
    return loaded


def describe(model: Model, options) -> Decoder | None:
    """Return the shapes and formats of the weights, if the header of the file
    determines them."""
    if options.adapters is not None:
        return None
    try:
        return load(model, options, abstract=True)
    except ValueError:  # For a damaged file, `load` raises it again.
        return None


def encode(text: Text, options) -> list[int] | None:
    """Return the tokens of the prompt, or `None` for an interactive chat."""
    if not options.chat:
        return text.encode(options.prompt)
    # For an interactive chat, this checks that there is a chat template.
    messages = [{"role": "user", "content": options.prompt or ""}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    prompt = text.encode_chat(messages)
    return prompt if options.prompt else None


@without_collections()
@short_turns()
def start(options) -> tuple[Generator, Decoder, Text, list[int] | None]:
    """Return a generator whose programs are being compiled, its model, the text tools,
    and the tokens of the prompt. Weights are loaded at the same time."""
    if not options.no_program_cache:
        keep_programs()
    source = open_model(options.model)
    loading = ThreadPoolExecutor(1).submit(load, source, options)
    skeleton = describe(source, options)
    text = Text(source, options.stop)
    prompt = encode(text, options)
    capacity = len(prompt) + options.tokens if prompt else options.context
    longest = source.context_length
    if longest and capacity > longest:
        print(f"(The model was made for {longest} tokens.)", file=sys.stderr)
    kv, _, rotated = options.kv.partition("-")
    kv = None if kv == "float" else kv
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    how = capacity, kv, sampling, options.seed, bool(rotated)
    generator = Generator(skeleton or loading.result(), *how)
    generator.start_compiling(len(prompt or [0]), loading)
    model = loading.result()
    generator.put(model)
    return generator, model, text, prompt


def run(options) -> None:
    begin = time.perf_counter()
    generator, model, text, prompt = start(options)
    if prompt is None:
        generator.compile(1)
        chat(generator, text, options.tokens, options.system)
        return
    loaded = time.perf_counter()
    times = generate(generator, text, prompt, options.tokens)

    decoded = times["tokens"] - 1  # Prefill returns the first token.
    rate = lambda count, seconds: f"{count / seconds:.1f}" if count > 0 else "-"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"\nloading {loaded - begin:.1f} s, "
        f"compiling {generator.seconds_compiling:.1f} s\n"
        f"prefill {rate(len(prompt), times['prefill'])} tokens/s of {len(prompt)}, "
        f"decode {rate(decoded, times['decode'])} tokens/s of {max(0, decoded)}\n"
        f"weights {eqquant.trees.nbytes(model) / 1e6:.1f} MB, cache for "
        f"{generator.capacity} tokens "
        f"{eqquant.trees.nbytes(generator.cache) / 1e6:.1f} MB; "
        f"peak memory of the process {peak:.0f} MB"
    )


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        run(options)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
