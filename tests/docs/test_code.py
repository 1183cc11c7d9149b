"""The Python of the README and of every page of `docs/` runs as it stands, page by page."""

import ast
import functools
import importlib.util
import json
import linecache
import os
import re
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import meshdsl as md
from docs.making import notebook
from meshdsl.cli import main
from meshdsl.training import Recipe, Reporting, train
from tests.docs.pages import DOCS, LANGUAGES, PAGES, README, ROOT, blocks, name_of

GUIDES = DOCS / "guides"
# Packages of extras, without which a block that imports one is left out.
OPTIONAL = {"lm_eval", "tokenizers"}
# What the README shows is what the guides show, which run.
WITH_CODE = [page for page in PAGES if page != README and blocks(page, "python")]


def missing(block):
    """Returns the optional packages that a block imports and that are not installed."""
    tree = ast.walk(ast.parse(block.text))
    imports = [one for one in tree if isinstance(one, ast.Import | ast.ImportFrom)]
    named = [getattr(one, "module", None) or one.names[0].name for one in imports]
    packages = {name.partition(".")[0] for name in named}
    return [name for name in packages & OPTIONAL if importlib.util.find_spec(name) is None]


@functools.cache
def names_of(page):
    """Returns the names that the blocks of a page define, one after the other."""
    names: dict = {}
    with jax.enable_x64(False):
        for block in blocks(page, "python"):
            if missing(block):
                continue
            # Tensors are called by the names that statements assign to, read off the source.
            lines = block.text.splitlines(keepends=True)
            linecache.cache[block.name] = len(block.text), None, lines, block.name
            exec(compile(block.text, block.name, "exec"), names)
    return names


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("A text to train on, word by word. " * 20)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="datasets|lm_eval|transformers|multiprocess")
        names_of(page)
    lacking = {name: block.line for block in blocks(page, "python") for name in missing(block)}
    if lacking:
        pytest.skip(f"all but the blocks that need {lacking} have run")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_its_language(page):
    fences = re.findall(r"^( *)```(.*)$", page.read_text(), re.M)
    assert {language for _, language in fences[::2]} <= {*LANGUAGES}
    assert {language for _, language in fences[1::2]} <= {""}
    assert not [indent for indent, _ in fences if indent], "in lists, blocks are not shown as code"


def test_the_readme_is_short_and_shows_what_the_guides_show():
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    (code,) = blocks(README, "python")
    assert code.text in (GUIDES / "write-a-model.md").read_text()
    table = re.search(r"\| parallelism \|.*?\n\n", text, re.S)
    assert table and table[0] in (GUIDES / "choose-a-layout.md").read_text()


def test_the_classifier_learns_with_an_optimizer_of_its_own_too():
    names = names_of(GUIDES / "write-a-model.md")
    losses = names["result"].losses
    assert len(losses) == 50 and losses[-1] < losses[0]
    lion = names_of(GUIDES / "optimizers.md")["Lion"]()
    with jax.enable_x64(False):
        recipe = Recipe(names["init"], names["loss"], lion)
        own = train(recipe, names["batches"](), steps=30, reporting=Reporting(quiet=True))
    assert own.losses[-1] < own.losses[0]


def test_a_program_as_plain_jax_gives_the_same_numbers():
    names = names_of(GUIDES / "programs.md")
    np.testing.assert_allclose(names["again"], names["y"], rtol=1e-6)
    assert [c.kind for c in names["program"].collectives] == ["all_reduce"]


def test_the_model_for_the_command_line_has_a_loss():
    names = names_of(GUIDES / "models.md")
    tiny = names["tiny"]
    program = md.jit(tiny.loss).lower(
        {"embedding": md.spec([names["vocab"], names["embed"]])}, tiny.batch_spec(2, 8)
    )
    assert program.block.outputs[0].shape == ()


def test_the_listing_of_names_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    page = GUIDES / "from-jax.md"
    first, *others = (block.text for block in blocks(page, "python"))
    (example,) = (text for text in others if "def example()" in text)
    (tmp_path / "my_model.py").write_text(f"{first}\n{example}")
    monkeypatch.chdir(tmp_path)
    (shown,) = (b.text for b in blocks(page, "console") if "meshdsl names" in b.text)
    _, *lines, last = shown.splitlines()
    assert last == "..."
    assert main.run(["names", "my_model.py:example"]) == 0
    assert "\n".join(lines) in capsys.readouterr().out


def test_the_notebook_is_the_page_start():
    hint = "write it anew: python -m docs.making.notebook"
    assert notebook.NOTEBOOK.read_text() == notebook.text(), hint
    cells = json.loads(notebook.text())["cells"]
    code = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
    shown = [block.text.rstrip("\n") for block in blocks(DOCS / "start.md", "python")]
    assert [one for one in code if not one.startswith("!")] == shown
    assert sum(one.startswith("!meshdsl ") for one in code) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's libraries have warnings
def test_the_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    kernels = pytest.importorskip("ipykernel.kernelspec")
    kernels.install(prefix=str(tmp_path), kernel_name="start")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    book = nbformat.reads(notebook.NOTEBOOK.read_text(), as_version=4)
    nbclient.NotebookClient(book, timeout=1800, kernel_name="start").execute()
    said = [
        "".join(str(output.get("text", "")) for output in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]
    trained, written, explained = said[-3:]
    assert "step" in trained and written.startswith("def ") and "collectives" in explained
