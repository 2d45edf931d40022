"""Turn the notebooks of docs/notebooks into Markdown pages for the site, or run them.

python tools/notebooks.py    runs all of them and replaces their outputs
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "docs" / "notebooks").glob("*.ipynb"))
KERNEL = {"kernelspec": {"display_name": "Python 3", "name": "python3"}, "language_info": {"name": "python"}}
LOCAL = Config({"KernelManager": {"transport": "ipc"}})  # the kernel opens no network ports


def executed(path: Path) -> Any:
    """Return the notebook with new outputs, without times and versions, which would change with every run."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", coalesce_streams=True, config=LOCAL).execute()
    notebook.metadata = nbformat.from_dict(KERNEL)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


def markdown(path: Path) -> str:
    """Return a notebook with its outputs as one Markdown page: text as fenced blocks, images as data."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            parts += [f"```python\n{cell.source}\n```", *map(_shown, cell.outputs)]
        else:
            parts.append(cell.source)
    return "\n\n".join(parts) + "\n"


def _shown(output: Any) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        content = base64.b64encode(data["image/svg+xml"].encode()).decode()
        return f"![Output of the code above](data:image/svg+xml;base64,{content})"
    if "image/png" in data:
        return f"![Output of the code above](data:image/png;base64,{''.join(data['image/png'].split())})"
    text = data.get("text/plain", output.get("text", ""))
    return f"```text\n{text.rstrip()}\n```"


if __name__ == "__main__":
    for each in NOTEBOOKS:
        nbformat.write(executed(each), each)
        print(f"{each.name}: {each.stat().st_size:,} bytes")
