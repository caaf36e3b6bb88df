"""The chat of examples/llama, with a generator that repeats fixed answers."""

import os
import pathlib
import signal
import sys

import pytest
from tokenizers import decoders, models, Tokenizer


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

import generate  # noqa: E402
from chat import chat, HELP  # noqa: E402


WORDS = [" a", " b", " c", "."]
END = 3


class Text:
    """A message has as many tokens as words, and one more."""

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.decoder = decoders.Fuse()
    stop = frozenset({END})

    def __init__(self):
        self.seen = []

    def encode_chat(self, messages):
        self.seen.append([(m["role"], m["content"]) for m in messages])
        return [0] * sum(1 + len(m["content"].split()) for m in messages)


class Generator:
    capacity = 20

    def __init__(self, tokens, press=None):
        self.tokens, self.press = tokens, press

    def __call__(self, prompt, stop):
        for i, token in enumerate(self.tokens):
            if i == self.press:
                os.kill(os.getpid(), signal.SIGINT)
            yield token


def talk(lines, generator, longest=9, system=None):
    """Return the messages of each prompt."""
    remaining = iter(lines)

    def read(prompt):
        line = next(remaining, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    text = Text()
    chat(generator, text, longest, system, read)
    return text.seen


def test_history_and_commands(capsys):
    seen = talk(
        ["hi", "", "/what", "again", "/reset", "new", "/exit"], Generator([0, 1])
    )
    out = capsys.readouterr().out
    answer = ("assistant", " a b")
    again = [("user", "hi"), answer, ("user", "again")]
    assert seen == [[("user", "hi")], again, [("user", "new")]]
    assert out.count(" a b\n") == 3 and "There is no command /what" in out
    assert out.startswith(HELP)


def test_system_messages_stay_and_old_messages_go(capsys):
    seen = talk(["one two"] * 4, Generator([0]), longest=8, system="be brief")
    # A question has three tokens, an answer two, and the limit is 12.
    assert [m[0] for m in seen[-1]] == ["system", "user", "assistant", "user"]
    assert capsys.readouterr().out.count("The oldest question") == 2
    seen = talk(["word " * 12, "hi", KeyboardInterrupt()], Generator([0]))
    assert seen[-1] == [("user", "hi")]
    assert "takes more than 11 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("press, longest", [(1, 9), (None, 2)])
def test_answers_stop(press, longest, capsys):
    before = signal.getsignal(signal.SIGINT)
    seen = talk(["hi", "more"], Generator([0, 1, 2, 2], press), longest)
    assert signal.getsignal(signal.SIGINT) is before
    # Ctrl-C arrives before the second token, which is still printed.
    assert seen[-1][1] == ("assistant", " a b")
    assert " a b\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "a prompt is required without --chat"),
        (["--chat", "--context", "100", "--tokens", "100"], "--context must be more"),
        (["hi", "--system", "be brief"], "--system requires --chat"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        generate.parse(["model.gguf", *arguments])
    assert message in capsys.readouterr().err
