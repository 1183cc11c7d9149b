"""The page Start as a notebook: `python -m docs.making.notebook` writes examples/start.ipynb.

Its Python blocks, which a test runs, are the cells of code. Command lines are cells that call them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, NOTEBOOK = ROOT / "docs" / "start.md", ROOT / "examples" / "start.ipynb"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.M | re.S)


def text() -> str:
    """Returns the notebook."""
    page = PAGE.read_text()
    cells: list[dict[str, Any]] = []
    end = 0
    for block in _BLOCK.finditer(page):
        cells += _prose(page[end : block.start()], len(cells))
        end = block.end()
        code = block[2].rstrip("\n")
        if block[1] == "bash" and code.startswith("meshdsl "):
            code = f"!{code}"
        elif block[1] != "python":  # what makes the environment that the notebook runs in
            cells += _prose(block[0], len(cells))
            continue
        made = {"execution_count": None, "metadata": {}, "outputs": []}
        cells.append({"cell_type": "code", "id": f"cell-{len(cells)}", **made, **_source(code)})
    cells += _prose(page[end:], len(cells))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _prose(words: str, number: int) -> list[dict[str, Any]]:
    # Links to pages are for the site; a notebook stands alone.
    words = re.sub(r"\[([^\]]+)\]\([^)]*\.md[^)]*\)", r"\1", words).strip("\n")
    made = {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}}
    return [{**made, **_source(words)}] if words.strip() else []


def _source(words: str) -> dict[str, list[str]]:
    return {"source": words.splitlines(keepends=True)}


if __name__ == "__main__":
    NOTEBOOK.write_text(text())
