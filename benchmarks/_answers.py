"""Write the answers of language models to a few questions as Markdown."""

import pathlib
import textwrap
from typing import Any

from _llama_example import comparison, sampling


QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Name three primary colors.",
    "How do I boil an egg?",
)
TOKENS, CHARACTERS = 40, 140
_HEAD = "| weights | answer |", "| --- | --- |"


class Answers:
    """The answers of models to `QUESTIONS`, one Markdown table per question.

    Answers are greedy, and are cut after `TOKENS` tokens and at the end of a word
    within `CHARACTERS` characters. The rows of an existing file are kept. A new answer
    replaces the row with the same name."""

    def __init__(self, text: Any, path: pathlib.Path):
        self.text, self.path = text, path
        self.tables = {question: {} for question in QUESTIONS}
        if path.exists():
            self._read()

    def add(self, name: str, model: Any) -> None:
        for question, rows in self.tables.items():
            prompt = self.text.encode_chat([{"role": "user", "content": question}])
            greedy = sampling.Sampling(0)
            ids, _ = comparison.sample(model, self.text, prompt, TOKENS, greedy)
            written = self.text.tokenizer.decode(ids)
            answer = textwrap.shorten(written, CHARACTERS, placeholder=" ...")
            rows[name] = answer.replace("|", "\\|")
        self._write()

    def _read(self) -> None:
        rows: dict = {}
        for line in self.path.read_text().splitlines():
            if line.startswith("**"):
                rows = self.tables.get(line.strip("*"), {})
            elif line.startswith("| ") and line not in _HEAD:
                name, answer = line.strip("| ").split(" | ", 1)
                rows[name] = answer

    def _write(self) -> None:
        parts = []
        for question, rows in self.tables.items():
            lines = (f"| {name} | {answer} |" for name, answer in rows.items())
            parts.append("\n".join([f"**{question}**", "", *_HEAD, *lines]))
        self.path.write_text("\n\n".join(parts) + "\n")
