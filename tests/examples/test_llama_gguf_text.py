"""Tokenizers that examples/llama makes from the metadata of GGUF files."""

import itertools
import json
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from tokenizers import models, pre_tokenizers, Regex, Tokenizer, trainers


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

from gguf_file import GGUF  # noqa: E402
from gguf_text import vocabulary_of_gguf  # noqa: E402
from text import Text  # noqa: E402


WHERE = pathlib.Path("model.gguf")
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
TEXTS = [
    "Hello, world! I'll say it's 12345.678 and WE'RE done\u2026",
    "def f(x):\n\t\treturn x ** 2  # a comment\n\n\n    if True:\r\n        pass",
    "na\u00efve caf\u00e9, \u65e5\u672c\u8a9e\u306e\u6587\u7ae0, \u0420\u0443\u0441, "
    "\u0939\u093f\u0928\u094d\u0926\u0940, \u0661\u0662\u0663 \u00bd",
    "   leading and trailing   \n \n  \t ",
    "emoji \U0001f600\U0001f469\u200d\U0001f4bb and e\u0301 combined",
    "<s>control</s> <|end|> tokens<|end|><s> inside",
]


def ordinary(text):
    """Return whether a text has neither surrogates nor unassigned characters, whose
    classes depend on the version of Unicode."""
    import unicodedata

    return all(unicodedata.category(c) not in ("Cs", "Cn", "Co") for c in text)


mixed = st.lists(
    st.one_of(
        st.sampled_from([*TEXTS, " ", "  ", "\n", "'s", "'LL", "7", "12", "<s>"]),
        st.text(max_size=8).filter(ordinary),
    ),
    max_size=6,
).map("".join)

_original = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_bytes = lambda use_regex: pre_tokenizers.ByteLevel(False, use_regex=use_regex)


def _split(digits):
    regex = Regex(_original.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(regex, "isolated"), _bytes(False)]
    )


# The pre-tokenizers as the files of Hugging Face have them.
ORIGINALS = {
    "gpt-2": _bytes(True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _bytes(True)]),
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
}
SPECIAL = ["<s>", "</s>", "<|end|>"]


def byte_level(pre):
    """Train a tokenizer. Return it and its metadata in a GGUF file."""
    original = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    original.pre_tokenizer = ORIGINALS[pre]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    original.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return original, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": np.array(
            [CONTROL if token in SPECIAL else 1 for token in tokens], np.int32
        ),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


@pytest.mark.parametrize("pre", ORIGINALS)
def test_merges_of_bytes(pre):
    original, metadata = byte_level(pre)
    found = vocabulary_of_gguf(WHERE, metadata)
    assert (found.bos, found.eos) == ("<s>", "</s>")
    assert found.stop == {1, 2}  # `<|end|>` ends an answer in every model.

    @given(mixed)
    @settings(max_examples=40, deadline=None)
    def check(text):
        begin = [0] if pre == "llama-bpe" else []
        ids = original.encode(text).ids
        assert found.tokenizer.encode(text).ids == begin + ids
        assert found.tokenizer.decode(ids, skip_special_tokens=False) == text

    for text in TEXTS:
        check = example(text)(check)
    check()


#
# Scores
#


def scored(extra=(), **changes):
    """Return the metadata of a vocabulary with scores. It lacks many characters, but
    has each character of its words."""
    words = "\u2581 a b c t h e the \u2581the th he \u2581t ab bc abc aa aaa aaaa"
    words = [*words.split(" "), "\u2581\u2581", "\u00e9", *extra]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * len(words)
    tokens += [*words, "<|end|>", "\n\n"]
    types += [CONTROL, USER_DEFINED]
    # Longer words first, and no two scores are equal.
    scores = [len(token) - i / 1e4 for i, token in enumerate(tokens)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        **changes,
    }


def merged(text, metadata):
    """Tokenize a text without special tokens: merge the neighbours with the best score
    until no merge is in the vocabulary, as llama.cpp does."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (-scores[ids[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out = []
    for part in parts:
        raw = [f"<0x{byte:02X}>" for byte in part.encode()]
        out += [ids[part]] if part in ids else [ids[byte] for byte in raw]
    return out


letters = st.text(st.sampled_from("abcthe \u00e9\u65e5\u672c\U0001f600\n"), max_size=20)


@given(letters.filter(lambda text: "\n\n" not in text), st.booleans())
@example("aaaaa aaaaaaa", True)
@settings(max_examples=150, deadline=None)
def test_merges_by_score(text, has_prefix):
    changes = {"tokenizer.ggml.add_space_prefix": has_prefix}
    metadata = scored(**changes)
    tokenizer = vocabulary_of_gguf(WHERE, metadata).tokenizer
    expected = merged(" " * (has_prefix and text != "") + text, metadata)
    assert tokenizer.encode(text).ids == [1, *expected]
    assert tokenizer.decode(expected) == text


def test_special_tokens_inside_of_text():
    metadata = scored()
    tokenizer = vocabulary_of_gguf(WHERE, metadata).tokenizer
    got = [tokenizer.id_to_token(i) for i in tokenizer.encode("the\n\n</s>the").ids]
    assert got == ["<s>", "\u2581the", "\n\n", "</s>", "\u2581the"]


#
# Rules of special tokens
#

CHAT = [{"role": "user", "content": "the"}]


def text_of(**changes):
    class Alone(GGUF):
        def __init__(self):
            self.path, self._metadata = WHERE, scored(**changes)

    return Text(Alone())


def test_rules_of_begin_and_end():
    key = "tokenizer.ggml."
    assert text_of().encode("a")[0] == 1
    assert text_of(**{f"{key}add_bos_token": False}).encode("a")[0] != 1
    both = {f"{key}add_eos_token": True, f"{key}bos_token_id": 2}
    assert text_of(**both).encode("a")[::3] == [2, 2]
    document = text_of().encode_document("a")
    assert document[0] == 1 and document[-1] == 2
    stop = text_of(**{f"{key}eot_token_id": 3}).stop
    assert stop == {2, 3, scored()[f"{key}tokens"].index("<|end|>")}


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "<s> the"])
def test_chats_begin_once(template):
    text = text_of(**{"tokenizer.chat_template": template})
    assert text.encode_chat(CHAT).count(1) == 1
    with pytest.raises(ValueError, match="model.gguf has no chat template"):
        text_of().encode_chat(CHAT)


BAD = {
    "model": ("bert", "model must be 'gpt2' or 'llama', got 'bert'"),
    "tokens": (["a", "a"], "tokens has equal tokens"),
    "scores": (np.zeros(3, np.float32), "scores must be an array of 2.. numbers"),
    "token_type": (None, None),
    "bos_token_id": (10**6, "bos_token_id must be less than"),
    "eos_token_id": ("2", "eos_token_id must be an integer"),
    "add_bos_token": (1, "add_bos_token must be a bool"),
}


@pytest.mark.parametrize("key", BAD)
def test_bad_metadata(key):
    value, message = BAD[key]
    changed = {f"tokenizer.ggml.{key}": value}
    if message is None:  # An optional key.
        vocabulary_of_gguf(WHERE, scored(**changed))
        return
    with pytest.raises(ValueError, match=f"model.gguf: tokenizer.ggml.{message}"):
        vocabulary_of_gguf(WHERE, scored(**changed))


def test_bad_merges():
    _, metadata = byte_level("gpt-2")
    for key, value, message in (
        ("pre", "unheard-of", "pre must name a known pre-tokenizer, got 'unheard-of'"),
        ("pre", None, "pre must name a known pre-tokenizer, got 'none'"),
        ("merges", ["nothing"], "merges has 'nothing'"),
        ("merges", ["? missing!"], "merges has '\\? missing!'"),
        ("merges", None, "merges is missing"),
    ):
        with pytest.raises(ValueError, match=f"tokenizer.ggml.{message}"):
            vocabulary_of_gguf(WHERE, {**metadata, f"tokenizer.ggml.{key}": value})
