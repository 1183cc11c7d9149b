"""Every example is listed where people look for it, has a layout and a test."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = ROOT / "docs" / "guides" / "examples.md"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_listed_with_its_layout_and_tested(example):
    row = re.search(rf"^\| `{example.name}`: [^|]+ \| `([^`|]+)` \|", PAGE.read_text(), re.M)
    assert row, f"{PAGE} has no row for {example.name}"
    shown = re.search(r"--layout='([^']+)'", ast.get_docstring(ast.parse(example.read_text())))
    assert shown, "the docstring has no command with a layout"
    assert row[1].replace(" ", "") == shown[1].replace(" ", "")
    assert (ROOT / "tests" / "examples" / f"test_{example.name}").exists()
