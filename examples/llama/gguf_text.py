"""The tokenizer of a GGUF file, made from its metadata.

Tokens equal the tokens of llama.cpp. The file names its pre-tokenizer, but does not
contain its regular expressions.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf_values import Values
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    Regex,
    Tokenizer,
)
from vocabulary import Vocabulary


_gpt2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_smollm = (r"\p{N}", *_gpt2)
_contractions = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_spaces = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_words = (
    rf"{_contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}DIGITS"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_spaces}"
)
_upper, _lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_tekken = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_upper}*{_lower}+|[^\r\n\p{{L}}\p{{N}}]?{_upper}+{_lower}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_spaces}",
)
_llama3, _qwen2 = (_words.replace("DIGITS", "{1,3}"),), (_words.replace("DIGITS", ""),)
# The pre-tokenizers by name: regular expressions that split a text one after the other.
_pre_tokenizers: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _gpt2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _smollm
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _llama3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _llama3),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _qwen2
    ),
    "tekken": _tekken,
}
# Pre-tokenizers whose words are looked up in the vocabulary before they are merged.
_whole_words = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "glm4"}
_whole_words |= {"tekken"}
# Pre-tokenizers whose texts begin with `bos`, unless the file has another rule.
_begins = _whole_words - {"glm4"}

# The types of tokens that are found in the text before it is split.
_unknown, _control, _user_defined = 2, 3, 4
# Tokens that end an answer, whether the file names them or not, as in llama.cpp.
_ends = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<|fim_pad|>", "<|repo_name|>", "<reponame>"),
    "<|file_sep|>",
}
_space = "▁"


def vocabulary_of_gguf(where: pathlib.Path, metadata: Mapping[str, Any]) -> Vocabulary:
    """Make the tokenizer and read the chat template."""
    values = Values(where, metadata, "tokenizer.ggml.")
    tokens = values.texts("tokens")
    if len(set(tokens)) != len(tokens):
        values.fail("tokens", "has equal tokens.")
    ids = {token: i for i, token in enumerate(tokens)}
    kind = values.text("model")
    if kind == "gpt2":
        pre = values.text("pre", "none")
        tokenizer = _byte_level(values, ids, pre)
        adds_bos = pre in _begins
    elif kind == "llama":
        tokenizer = _by_scores(values, tokens, ids)
        adds_bos = True
    else:
        values.fail("model", f"must be 'gpt2' or 'llama', got {kind!r}.")

    is_scored = kind == "llama"
    defaults = dict(bos=1, eos=2) if is_scored else dict(bos=11, eos=11)
    special: dict[str, Any] = {
        name: _token(values, f"{name}_token_id", defaults.get(name), len(tokens))
        for name in ("bos", "eos", "eot", "eom")
    }
    ends = {ids[token] for token in _ends & ids.keys()}
    ends |= {special[name] for name in ("eos", "eot", "eom")} - {None}
    _add_special(values, tokenizer, tokens, ends)

    text = lambda name: "" if special[name] is None else tokens[special[name]]
    bos = text("bos") if values.flag("add_bos_token", adds_bos) else ""
    eos = text("eos") if values.flag("add_eos_token", False) else ""
    _surround(tokenizer, bos, eos, ids)
    template = Values(where, metadata, "tokenizer.").text("chat_template", None)
    return Vocabulary(
        where,
        tokenizer,
        text("bos"),
        text("eos"),
        frozenset(ends),
        template,
        bool(bos),
    )


def _token(values: Values, name: str, default: int | None, count: int) -> int | None:
    index = values.integer(name, None, least=0)
    if index is None:
        return default if default is not None and default < count else None
    if index >= count:
        values.fail(name, f"must be less than {count}, got {index}.")
    return index


def _byte_level(values: Values, ids: dict[str, int], pre: str) -> Tokenizer:
    """Make a tokenizer for merges of bytes, as GPT-2 has it."""
    if pre not in _pre_tokenizers:
        values.fail(
            "pre",
            f"must name a known pre-tokenizer, got {pre!r}. Known: "
            f"{', '.join(sorted(_pre_tokenizers))}.",
        )
    merges = []
    for merge in values.texts("merges"):
        # The first token may begin with a space.
        at = merge.find(" ", 1)
        first, second = merge[:at], merge[at + 1 :]
        is_known = first in ids and second in ids and first + second in ids
        if at < 0 or not is_known:
            values.fail("merges", f"has {merge!r}, whose parts are not in tokens.")
        merges.append((first, second))
    model = models.BPE(ids, merges, ignore_merges=pre in _whole_words)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(x), "isolated") for x in _pre_tokenizers[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _by_scores(values: Values, tokens: list[str], ids: dict[str, int]) -> Tokenizer:
    """Make a tokenizer that merges the pair with the best score, as SentencePiece
    does. Characters outside of the vocabulary become bytes."""
    scores = values.numbers("scores", len(tokens))
    unknown: Any = _token(values, "unknown_token_id", 0, len(tokens))
    order = np.argsort(-scores, kind="stable")
    merges = []
    for i in order:
        token = tokens[i]
        for at in range(1, len(token)):
            first, second = ids.get(token[:at]), ids.get(token[at:])
            if first is not None and second is not None:
                # Gemma has 580,000 merges. The strings of tokens take no new memory.
                merges.append((tokens[first], tokens[second]))
    model = models.BPE(
        ids, merges, unk_token=tokens[unknown], byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    has_prefix = values.flag("add_space_prefix", True)
    replace = normalizers.Replace(" ", _space)
    prefix = [normalizers.Prepend(" ")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, replace])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    return tokenizer


def _add_special(
    values: Values, tokenizer: Tokenizer, tokens: list[str], ends: set[int]
) -> None:
    """Declare the tokens that are found in a text before it is split."""
    types = values.numbers("token_type", len(tokens), np.zeros(len(tokens), np.int32))
    ends_mask = np.isin(np.arange(len(tokens)), list(ends))
    is_special = np.isin(types, (_unknown, _control)) | ends_mask
    make = lambda i, special: AddedToken(tokens[i], special=special, normalized=False)
    tokenizer.add_special_tokens([make(i, True) for i in np.flatnonzero(is_special)])
    is_user = (types == _user_defined) & ~is_special
    tokenizer.add_tokens([make(i, False) for i in np.flatnonzero(is_user)])


def _surround(tokenizer: Tokenizer, bos: str, eos: str, ids: dict[str, int]) -> None:
    """Put `bos` before and `eos` after each text."""
    if bos or eos:
        template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            special_tokens=[(token, ids[token]) for token in {bos, eos} - {""}],
        )
