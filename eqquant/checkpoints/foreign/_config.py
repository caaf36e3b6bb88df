"""What `config.json` says beside a checkpoint of how its weights are packed."""

from collections.abc import Sequence
from typing import Any

from ..files import MAX_HEADER, parse_object, Source


class PackingConfig:
    """`quantization_config` of the `config.json` beside a checkpoint.

    **Fields:**

    - `where`: the path, for errors.
    - `method`: `quant_method`, which says whose layout it is.
    """

    where: str
    method: Any

    def __init__(self, source: Source, has: str, says: str):
        path = source.path.parent / "config.json"
        self.where = str(path)
        if not path.is_file() or path.stat().st_size > MAX_HEADER:
            raise ValueError(
                f"{source.path}: has {has}, but there is no {path.name} beside it, "
                f"which says {says}."
            )
        found = parse_object(path.read_bytes(), self.where).get("quantization_config")
        self._values = found if isinstance(found, dict) else {}
        self.method = self._values.get("quant_method")
        if not isinstance(self.method, str):
            raise ValueError(
                f"{path}: quantization_config must be an object with a quant_method, "
                f"as {source.path.name} has {has}."
            )

    def one_of(self, name: str, allowed: Sequence[Any], default: Any = ...) -> Any:
        """A value, which must be one of these."""
        value = self._values.get(name, default)
        # `True` is no 1, and `4.0` no 4.
        if not any(value == one and type(value) is type(one) for one in allowed):
            said = "nothing" if value is ... else repr(value)
            raise ValueError(
                f"{self.where}: {name} of quantization_config must be one of "
                f"{', '.join(map(repr, allowed))}, got {said}."
            )
        return value

    def block_size(self, name: str = "group_size") -> int | None:
        """How many weights share a scale; None, in the file -1, for a whole
        row."""
        value = self._values.get(name)
        if type(value) is not int or (value != -1 and not 0 < value < 2**31):
            raise ValueError(
                f"{self.where}: {name} of quantization_config must be a positive "
                f"integer or -1, got {value!r}."
            )
        return None if value == -1 else value

    def layout(self, names: Sequence[str], allowed: Sequence[str]) -> str:
        """How words are laid out, by the first of these names that is there; versions
        of a library have used several. By default the first that is allowed."""
        name = next((n for n in names if self._values.get(n) is not None), names[0])
        value = self._values.get(name, allowed[0])
        value = value.lower() if isinstance(value, str) else value
        if value not in allowed:
            raise ValueError(
                f"{self.where}: {name} of quantization_config is {value!r}, a layout "
                f"that eqquant does not read, only {', '.join(map(repr, allowed))}. "
                "Convert the checkpoint with the library that wrote it."
            )
        return value
