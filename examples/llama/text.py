"""Text to tokens and back: the tokenizer of a folder, its chat template, and the stop
tokens."""

import json
import pathlib
import time
from collections.abc import Sequence

from load import read_json
from tokenizers import Tokenizer


class Text:
    """A tokenizer with a chat template.

    **Arguments:**

    - `folder`: contains `tokenizer.json`, and optionally `tokenizer_config.json`,
        `generation_config.json` and `chat_template.jinja`.
    - `stop`: stop tokens in addition to those of the folder.
    """

    def __init__(self, folder: pathlib.Path, stop: Sequence[str] = ()):
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{folder} has no tokenizer.json.")
        self.tokenizer = Tokenizer.from_file(str(path))
        self._folder = folder
        self._options = self._read("tokenizer_config.json")
        self.stop = self._stop_of_folder()
        for token in stop:
            index = self.tokenizer.token_to_id(token)
            if index is None:
                raise ValueError(f"stop: {token!r} is not a token of this model.")
            self.stop.add(index)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Encode messages, each with a `role` and `content`, and the start of an
        answer."""
        text = self._render(messages, add_generation_prompt=True)
        # The template contains the special tokens.
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_document(self, text: str | Sequence[dict[str, str]]) -> list[int]:
        """Encode a text or a whole chat for training, with the final stop token."""
        if isinstance(text, str):
            ids = self.encode(text)
        else:
            chat = self._render(text, add_generation_prompt=False)
            ids = self.tokenizer.encode(chat, add_special_tokens=False).ids
        end = self._special("eos_token")
        index = self.tokenizer.token_to_id(end) if end else min(self.stop, default=None)
        return ids if index is None or ids[-1:] == [index] else [*ids, index]

    def _read(self, name: str) -> dict:
        path = self._folder / name
        return read_json(path) if path.exists() else {}

    def _stop_of_folder(self) -> set[int]:
        for name in ("generation_config.json", "config.json"):
            stop = self._read(name).get("eos_token_id")
            if stop is not None:
                return set(stop) if isinstance(stop, list) else {stop}
        return set()

    def _special(self, name: str) -> str:
        token = self._options.get(name) or ""
        return token["content"] if isinstance(token, dict) else token

    def _render(self, messages: Sequence[dict[str, str]], **options) -> str:
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ImportError(
                "A chat template needs jinja2: pip install jinja2"
            ) from None

        def raise_exception(message):
            raise TemplateError(message)

        # A template is untrusted code. The sandbox denies access to attributes of
        # Python objects, and to mutation.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = time.strftime
        environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
        try:
            return environment.from_string(self._template()).render(
                messages=messages,
                bos_token=self._special("bos_token"),
                eos_token=self._special("eos_token"),
                **options,
            )
        except TemplateError as error:
            raise ValueError(f"The chat template: {error}") from None

    def _template(self) -> str:
        path = self._folder / "chat_template.jinja"
        if path.exists():
            return path.read_text("utf-8")
        source = self._options.get("chat_template")
        if isinstance(source, list):  # Several named templates.
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if source is None:
            raise ValueError(
                f"{self._folder} has no chat template: the model is not a chat model."
            )
        return source
