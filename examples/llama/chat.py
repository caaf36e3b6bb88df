"""A chat in the terminal."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from text import Text
from tokenizers.decoders import DecodeStream


HELP = "Ctrl-C stops an answer, /reset starts a new chat, /exit or Ctrl-D ends."


class Answers(Protocol):
    """The part of `Generator` that a chat uses."""

    capacity: int

    def __call__(self, prompt: Sequence[int], stop: set[int]) -> Iterator[int]: ...


def chat(
    generator: Answers,
    text: Text,
    longest: int,
    system: str | None = None,
    read: Callable[[str], str] = input,
) -> None:
    """Read questions and print answers, until the input ends.

    **Arguments:**

    - `longest`: the largest number of tokens of an answer.
    - `system`: the system message.
    - `read`: prints a prompt, and returns a line.
    """
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    print(HELP)
    while True:
        try:
            line = read("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            print(f"There is no command {line}. {HELP}")
        elif line:
            messages.append({"role": "user", "content": line})
            room = generator.capacity - longest
            prompt = _prompt(text, messages, len(start), room)
            if prompt is None:
                messages.pop()
                print(f"(The question takes more than {room} tokens: see --context.)")
                continue
            answer = _answer(generator, text, prompt, longest)
            messages.append({"role": "assistant", "content": answer})


def _prompt(
    text: Text, messages: list[dict[str, str]], start: int, room: int
) -> list[int] | None:
    """Encode a chat in at most `room` tokens. Remove the oldest questions and answers
    after the first `start` messages if there are more tokens."""
    while len(prompt := text.encode_chat(messages)) > room:
        if len(messages) <= start + 1:
            return None
        del messages[start : start + 2]
        print("(The oldest question and its answer are removed: see --context.)")
    return prompt


def _answer(generator: Answers, text: Text, prompt: list[int], longest: int) -> str:
    """Print an answer while it is generated, and return it."""
    stream, pieces = DecodeStream(skip_special_tokens=True), []
    with _interrupts() as is_interrupted:
        for count, token in enumerate(generator(prompt, text.stop), 1):
            if piece := stream.step(text.tokenizer, token):
                pieces.append(piece)
                print(piece, end="", flush=True)
            if count == longest or is_interrupted():
                break
    print()
    return "".join(pieces)


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. An exception inside of
    a step would lose the cache, which the step donates."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
