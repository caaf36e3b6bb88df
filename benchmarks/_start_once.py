"""Start a language model once, in a separate process, and print when its stages ended.

    python benchmarks/_start_once.py LIBRARY BEGIN FILE PROMPT THREADS

`BEGIN` is the time of `time.monotonic()` at which the process was started. The script
prints JSON: the times of all stages in seconds since then, and the CPU seconds of the
process. The environment need not contain eqquant.
"""

import contextlib
import io
import json
import os
import pathlib
import sys
import time


BEGIN = float(sys.argv[2])
EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "llama"


class Stages:
    """The stages of a start. A stage can have several parts, which may overlap."""

    def __init__(self):
        self.rows: dict[str, list[tuple[float, float]]] = {}
        self.cpu: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Add a part that ends now."""
        now = time.monotonic() - BEGIN
        self.rows.setdefault(name, []).append((now - seconds, now))
        self.cpu[name] = time.process_time()

    @contextlib.contextmanager
    def stage(self, name: str):
        start = time.monotonic()
        yield
        self.add(name, time.monotonic() - start)


class FirstWrite(io.TextIOBase):
    """A stream that calls a function for the first text that is written to it."""

    def __init__(self, call):
        self._call = call

    def write(self, text: str) -> int:
        if self._call and text.strip():
            self._call()
            self._call = None
        return len(text)


def start_eqquant(stages: Stages, file: str, prompt: str) -> str:
    """Run `generate.py` as a user does, and record its stages."""
    with stages.stage("import jax"):
        import jax
    with stages.stage("import equinox"):
        import equinox  # noqa: F401
    with stages.stage("import eqquant"):
        import eqquant
    with stages.stage("import the example"):
        sys.path.insert(0, str(EXAMPLE))
        import generate
    names = {
        "/jax/core/compile/jaxpr_trace_duration": "trace",
        "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
        "/jax/core/compile/backend_compile_duration": "compile",
    }

    def listen(event: str, seconds: float, **_) -> None:
        # Shorter events are operations on single arrays, or traces inside of a trace.
        if event in names and seconds > 0.02:
            stages.add(names[event], seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    load = eqquant.load_quantized

    def load_quantized(*args, **kwargs):
        with stages.stage("load"):
            return load(*args, **kwargs)

    eqquant.load_quantized = load_quantized
    begin = time.monotonic()
    first = lambda: stages.add("first token", time.monotonic() - begin)
    with contextlib.redirect_stdout(FirstWrite(first)):
        options = ["--chat", "--temperature", "0", "--tokens", "8"]
        generate.main([file, prompt, *options])
    return f"jax {jax.__version__}"


def start_llama_cpp(stages: Stages, file: str, prompt: str) -> str:
    with stages.stage("import llama_cpp"):
        import llama_cpp
    begin = time.monotonic()
    threads = len(os.sched_getaffinity(0))
    with stages.stage("load"):
        model = llama_cpp.Llama(
            file, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False
        )
    answer = model.create_chat_completion(
        [{"role": "user", "content": prompt}], temperature=0, stream=True, max_tokens=8
    )
    next(piece for piece in answer if piece["choices"][0]["delta"].get("content"))
    stages.add("first token", time.monotonic() - begin)
    return f"llama-cpp-python {llama_cpp.__version__}"


def main() -> None:
    library, _, file, prompt, threads = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    stages = Stages()
    stages.add("start Python", time.monotonic() - BEGIN)
    run = start_eqquant if library == "eqquant" else start_llama_cpp
    version = run(stages, file, prompt)
    print(json.dumps([stages.rows, stages.cpu, version]))


if __name__ == "__main__":
    main()
