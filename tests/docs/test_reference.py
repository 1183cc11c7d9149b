"""The reference has every public name and every flag, and links in the repository hold."""

import re

import pytest

import meshdsl as md
from docs.making import flags as flags_page
from docs.making import reference
from docs.making.docstrings import spelled_out
from docs.making.site import INSIDE
from meshdsl import models, training
from meshdsl.cli import main
from meshdsl.cli.parsing.table import FLAGS
from meshdsl.training.step_metrics import KEYS
from tests.docs.pages import DOCS, PAGES, ROOT, name_of, prose

LISTED = {written for page in reference.order() for written, _ in reference.names_of(page)}
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
# Pages that the site makes; those of the root are shown inside of it.
MADE = {f"reference/{name}.md" for name in (*reference.order(), "index", "flags")}
MADE |= {f"inside/{name}.md" for name in INSIDE}


def test_every_public_name_is_on_a_page():
    functions = {f"md.{name}" for name in md.__all__} - {
        f"md.{name}" for name in ("fft", "linalg", "nn", "optim", "random")
    }
    assert functions <= LISTED
    for room in ("random", "linalg", "fft", "nn", "optim"):
        modules = {"initializers", "schedules"}  # whose functions are on the page of their room
        names = {f"md.{room}.{name}" for name in getattr(md, room).__all__ if name not in modules}
        assert names <= LISTED
    assert {f"meshdsl.training.{name}" for name in training.__all__} <= LISTED
    assert {f"meshdsl.models.{name}" for name in models.__all__} <= LISTED


def test_a_name_has_one_page():
    pages = [w for page in reference.order() for w, _ in reference.names_of(page)]
    assert len(pages) == len(set(pages))


@pytest.mark.parametrize("page", reference.order())
def test_a_page_has_an_entry_for_each_of_its_names(page):
    text = reference.text_of(page)
    names = [written for written, _ in reference.names_of(page)]
    assert names
    for written in names:
        path = reference.path_of(written)
        assert f"::: {path}\n" in text or f"### {written} {{ #{path} }}" in text


def test_a_type_or_a_constant_has_the_text_below_its_assignment():
    text = reference.text_of("optim")
    assert "### md.optim.Mask { #meshdsl.optim.Mask }" in text
    assert "Chooses parameters: a function of a parameter's path and shape." in text
    assert "Gives the learning rate of a step" in text
    assert "The last dim of a random key." in reference.text_of("random")
    with pytest.raises(LookupError, match=r"below its assignment in meshdsl\.optim\.opt"):
        reference.text_below("meshdsl.optim.optimizer.STACKED")


def test_the_docstring_of_a_made_function_is_markdown_with_its_example_as_code():
    text = reference.text_of("elementwise")
    entry = text[text.index("### md.exp {") : text.index("### md.exp2 {")]
    assert entry == (
        "### md.exp { #meshdsl.exp }\n\n```python\nmd.exp(x)\n```\n\nReturns e to the x.\n\n"
        "**Raises:** `ValueError`: x is not floating-point or complex.\n\n**Examples:**\n\n"
        '```pycon\n>>> x = md.named([-1.0, 0.0, 1.0], ["feature"])\n>>> print(md.exp(x))\n'
        "f32[feature=3] [0.3679 1.     2.7183]\n```\n\n"
    )
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    assert ">>>" not in outside and "Raises:\n" not in outside


def test_a_module_that_no_page_takes_is_named(monkeypatch):
    monkeypatch.setattr(reference, "PAGES", {})
    with pytest.raises(LookupError, match=r"md\.softmax of meshdsl\.ops\.reductions\.softmax is"):
        reference.page_of("softmax")


def test_every_command_and_every_flag_is_in_the_reference():
    text = flags_page.text()
    assert all(f"`--{name}`" in text for name in FLAGS)
    assert all(f"| `meshdsl {name}` |" in text for name in main.COMMANDS)


def test_the_page_of_flags_loses_no_sign_to_markdown():
    rows = [line for line in flags_page.text().splitlines() if line.startswith("| <span")]
    assert len(rows) >= len(FLAGS) - 5
    for row in rows:
        cell = re.sub("<span[^>]*></span>", "", row).strip("| ").split(" | ", 2)[2]
        assert not re.search(r"[*_]|\|.*\|", "".join(cell.split("`")[::2]))
        assert "&#" not in "".join(cell.split("`")[1::2])
    (data,) = [row for row in rows if "`--data`" in row]
    assert FLAGS["data"][2].replace("*", "&#42;").split(",")[0] in data


def test_every_metric_is_in_the_reference():
    text = (DOCS / "reference" / "files.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in text] == []


def anchors(text):
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=name_of)
def test_the_links_of_a_page_hold(page):
    for target, anchor in LINK.findall(prose(page)):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        if file.is_relative_to(DOCS) and str(file.relative_to(DOCS)) in MADE:
            continue  # `mkdocs build --strict` checks these
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), f"{target}#{anchor}"


def test_what_is_said_of_several_parameters_is_said_of_each():
    text = "Pads.\n\nArgs:\n    low, high: how many,\n        at each end.\n    value: of it.\n"
    assert spelled_out(text) == (
        "Pads.\n\nArgs:\n    low: how many,\n        at each end.\n"
        "    high: how many,\n        at each end.\n    value: of it.\n"
    )
