"""Pages from notebooks, with their stored outputs, which MkDocs runs as a hook."""

import json
import pathlib

from mkdocs.structure.files import File


def on_files(files, config):
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            notebook = json.loads(pathlib.Path(file.abs_src_path).read_text())
            page = str(pathlib.PurePosixPath(file.src_uri).with_suffix(".md"))
            content = as_markdown(notebook)
            files.append(File.generated(config, page, content=content))
    return files


def as_markdown(notebook: dict) -> str:
    return "\n\n".join(part for cell in notebook["cells"] for part in parts_of(cell))


def parts_of(cell: dict) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *map(shown, cell["outputs"])]


def shown(output: dict) -> str:
    data = output.get("data", {"text/plain": output.get("text")})
    if "text/html" in data:
        return "".join(data["text/html"])
    return f"```text\n{''.join(data['text/plain'])}\n```"
