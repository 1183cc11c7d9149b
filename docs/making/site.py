"""Hooks of MkDocs: pages that are made of the code, and of the documents at the root."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
INSIDE = {
    "architecture": "ARCHITECTURE.md",
    "glossary": "GLOSSARY.md",
    "benchmarks": "BENCHMARKS.md",
    "changelog": "CHANGELOG.md",
}


@cache
def made() -> dict[str, str]:
    """Returns the pages that are not files of `docs/`, by their place in it."""
    if str(ROOT) not in sys.path:  # MkDocs loads this file by its path
        sys.path.insert(0, str(ROOT))
    from docs.making import flags, reference

    pages = {f"reference/{name}.md": reference.text_of(name) for name in reference.order()}
    pages |= {"reference/index.md": reference.index(), "reference/flags.md": flags.text()}
    return pages | {
        f"inside/{name}.md": inside((ROOT / file).read_text()) for name, file in INSIDE.items()
    }


def inside(text: str) -> str:
    """Returns a document of the root as a page: its links are those of a page in `inside/`."""
    text = text.replace("](docs/", "](../")
    for name, file in INSIDE.items():
        text = text.replace(f"]({file}", f"]({name}.md")
    # Their long tables have every word; searches show guides and the reference first.
    return f"---\nsearch:\n  boost: 0.2\n---\n\n{text}"


def on_config(config: Any) -> Any:
    """Puts the pages of the reference into the navigation."""
    made()
    from docs.making import reference

    for section in config.nav:
        if "Reference" in section:
            pages = [f"reference/{name}.md" for name in reference.order()]
            section["Reference"][1:1] = pages
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made."""
    for name, text in made().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Shows a command and its output as MkDocs' highlighter knows them."""
    return re.sub(r"^```text$", "```", markdown, flags=re.M)
