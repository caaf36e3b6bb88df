"""Write a GGUF file, and run it with llama.cpp."""

import importlib.metadata
import pathlib

import _gguf
import _llama_gguf
import numpy as np
from _peers.llama_cpp import about_amx, ggml_of, quantized, row_bytes, TYPES

from . import prompt, random_ends, random_layer, Shape


variants = tuple(TYPES)
suffix = ".gguf"


def make(shape: Shape, variant: str, path: pathlib.Path) -> None:
    """Write the file of a variant: matrices in its type, norms in float32."""
    import llama_cpp

    ggml, kind = ggml_of(llama_cpp), TYPES[variant]
    context = 8 * (shape.prompt + shape.room)
    metadata = _llama_gguf.metadata(shape, context)
    metadata["tokenizer.ggml.model"] = "no_vocab"
    # Matrices are written in the order of the generators.
    drawn = {i: random_layer(shape, i) for i in range(shape.layers)}
    ends = random_ends(shape)

    def matrix(layer: int | None, name: str, rows: int, columns: int) -> _gguf.Tensor:
        def data():
            _, w = next(ends if layer is None else drawn[layer])
            return quantized(ggml, kind, w)

        nbytes = rows * row_bytes(ggml, kind, columns)
        return _gguf.Tensor(name, (rows, columns), kind, nbytes, data)

    _gguf.write(path, metadata, _llama_gguf.tensors(shape, matrix))


class Runs:
    """A model with one context per number of sequences. Contexts share the weights."""

    def __init__(self, shape: Shape, variant: str, path: pathlib.Path, threads: int):
        import llama_cpp

        self.lib, self.shape, self.threads = llama_cpp, shape, threads
        self.has_flash_attention = variant != "no flash attention"
        self.ggml = ggml_of(llama_cpp)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(bytes(path), params)
        assert self.model, f"llama.cpp cannot load {path}"
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.contexts = {}

    def version(self) -> str:
        version = importlib.metadata.version("llama-cpp-python")
        info = self.lib.llama_print_system_info().decode()
        features = [part.strip() for part in info.split("|") if "AVX" in part]
        amx = about_amx(self.ggml)
        return f"llama-cpp-python {version} ({', '.join(features)}), {amx}"

    def _context(self, sequences: int, context: int):
        if (sequences, context) not in self.contexts:
            lib, shape = self.lib, self.shape
            params = lib.llama_context_default_params()
            params.n_ctx = sequences * (context + shape.room)
            params.n_batch = params.n_ubatch = shape.prompt
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self.threads
            if not self.has_flash_attention:
                params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            new = lib.llama_init_from_model(self.model, params)
            assert new, "llama.cpp cannot make a context"
            self.contexts[sequences, context] = new
        return self.contexts[sequences, context]

    def _extend(self, context, tokens, start: int) -> np.ndarray:
        """Process tokens of shape (sequences, length), and return the next tokens."""
        lib = self.lib
        sequences, length = tokens.shape
        batch = lib.llama_batch_init(tokens.size, 0, 1)
        batch.n_tokens = tokens.size
        for i, token in enumerate(tokens.ravel().tolist()):
            sequence, position = divmod(i, length)
            batch.token[i], batch.pos[i] = token, start + position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = position == length - 1
        failed = lib.llama_decode(context, batch)
        lib.llama_batch_free(batch)
        assert not failed, f"llama_decode: {failed}"

        def choose(sequence):
            at = sequence * length + length - 1
            logits = lib.llama_get_logits_ith(context, at)
            return np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax()

        return np.array([[choose(i)] for i in range(sequences)])

    def _prompt(self, context, length: int) -> None:
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        tokens = prompt(self.vocabulary, length)
        for start in range(0, length, self.shape.prompt):
            self._extend(context, tokens[:, start : start + self.shape.prompt], start)

    def prepare(self, sequences: int, context: int) -> None:
        new = self._context(sequences, context)
        self._prompt(new, context)
        memory = self.lib.llama_get_memory(new)
        for i in range(1, sequences):
            self.lib.llama_memory_seq_cp(memory, 0, i, -1, -1)
        self.decode(sequences, context, 1)

    def prefill(self) -> None:
        self._prompt(self._context(1, self.shape.prompt), self.shape.prompt)

    def decode(self, sequences: int, context: int, steps: int) -> None:
        used = self._context(sequences, context)
        memory = self.lib.llama_get_memory(used)
        for i in range(sequences):
            self.lib.llama_memory_seq_rm(memory, i, context, -1)
        tokens = np.ones((sequences, 1), np.int32)
        for i in range(steps):
            tokens = self._extend(used, tokens, context + i)


def load(shape: Shape, variant: str, path: pathlib.Path, threads: int) -> Runs:
    return Runs(shape, variant, path, threads)
