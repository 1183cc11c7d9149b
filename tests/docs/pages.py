"""What the README and the pages of `docs/` show: their code blocks, by language."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# What users read, and what those read who change meshdsl.
PAGES = [README, ROOT / "BENCHMARKS.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]
PAGES += sorted(DOCS.rglob("*.md"))
LANGUAGES = (
    "python",
    "bash",
    "console",
    "text",
    "toml",
)  # console: commands after `$`, and what they print


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the page's line before it."""

    page: Path
    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Returns a page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """Returns the blocks of a page in a language, in order."""
    text = page.read_text()
    return [
        Block(page, language, found[2], text[: found.start()].count("\n") + 1)
        for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
        if found[1] == language
    ]


def prose(page: Path) -> str:
    """Returns a page without its blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
