"""The pages of the reference that are made of the code: every public name on one page.

A name belongs to the page of the module that defines it. A module that no page takes is an error
that names it, so nothing public can be left out.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import textwrap
import types
from dataclasses import dataclass
from typing import Any

import meshdsl as md
import meshdsl.models
import meshdsl.training
from meshdsl.ops.elementwise import broadcasting


@dataclass(frozen=True)
class Page:
    """A page of the reference: the modules whose public names it lists."""

    title: str
    says: str
    modules: tuple[str, ...]


PAGES = {
    "tensors": Page(
        "Tensors, dims and modules",
        "Dims and shapes, arrays with named dims, and classes that hold tensors.",
        (
            "meshdsl.tensors",
            "meshdsl.ops.creation",
            "meshdsl.running.inspection",
            "meshdsl.reports.notebook",
        ),
    ),
    "programs": Page(
        "Programs, meshes and layouts",
        "What compiles a function, and what says where its tensors are.",
        (
            "meshdsl.running.jit",
            "meshdsl.running.placing",
            "meshdsl.imports",
            "meshdsl.layouts",
            "meshdsl.lowering.options",
            "meshdsl.tracing",
            "meshdsl.precision",
        ),
    ),
    "elementwise": Page(
        "Elementwise operations",
        "Operands broadcast by name: one of them has the dims of all.",
        ("meshdsl.ops.elementwise",),
    ),
    "dims": Page(
        "Operations on dims",
        "Renaming, cutting and joining dims; windows that move along them.",
        ("meshdsl.ops.shapes",),
    ),
    "reductions": Page(
        "Reductions, order and look-up",
        "What sums, compares, sorts, counts and looks up along dims.",
        ("meshdsl.ops.reductions", "meshdsl.ops.sorting", "meshdsl.ops.indexing"),
    ),
    "products": Page(
        "Products, attention and convolutions",
        "Matrix products by names, attention as one operation, windows over dims.",
        ("meshdsl.ops.products",),
    ),
    "control": Page(
        "Loops, branches and operations of your own",
        "Control flow, recomputation, prints and checks, primitives.",
        ("meshdsl.ops.control",),
    ),
    "gradients": Page(
        "Derivatives", "Gradients are programs of the same language.", ("meshdsl.gradients",)
    ),
}
# Public modules, each with a page: by what users call it.
MODULES = {
    "random": Page("md.random", "A value depends on its key and position alone.", ()),
    "linalg": Page("md.linalg", "Factorizations and solvers of matrices, in batches.", ()),
    "fft": Page("md.fft", "Fourier transforms along a dim.", ()),
    "nn": Page("md.nn", "Layers as functions of named tensors.", ()),
    "optim": Page("md.optim", "Optimizers, schedules and clipping.", ()),
    "training": Page("meshdsl.training", "The training loop and the records it takes.", ()),
    "models": Page("meshdsl.models", "Named models and the record that describes one.", ()),
}
_SECTION = re.compile(r"^(Raises|Examples):\n((?: +.*\n?|\n)+)", re.M)  # of a docstring
_OBJECTS: dict[str, types.ModuleType] = {
    **{name: getattr(md, name) for name in md.__all__ if inspect.ismodule(getattr(md, name))},
    "training": meshdsl.training,
    "models": meshdsl.models,
}
_INNER = {"nn": ("initializers",), "optim": ("schedules",)}  # modules that others list


def order() -> list[str]:
    """Returns the names of the pages, in the order of the navigation."""
    return [*PAGES, *MODULES]


def names_of(page: str) -> list[tuple[str, Any]]:
    """Returns the public names of a page as users write them, each with its object."""
    if page in MODULES:
        module, short = _OBJECTS[page], MODULES[page].title
        listed = []
        for name in module.__all__:
            if name in _INNER.get(page, ()):
                inner = getattr(module, name)
                listed += [(f"{short}.{name}.{n}", getattr(inner, n)) for n in _public(inner)]
            else:
                listed.append((f"{short}.{name}", getattr(module, name)))
        return listed
    names = [name for name in md.__all__ if not inspect.ismodule(getattr(md, name))]
    return [(f"md.{name}", getattr(md, name)) for name in names if page_of(name) == page]


def _public(module: types.ModuleType) -> list[str]:
    own = (name for name, value in vars(module).items() if _defined_in(value, module))
    return [name for name in own if not name.startswith("_")]


def _defined_in(value: Any, module: types.ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def page_of(name: str) -> str:
    """Returns the page of a name of `md.__all__`.

    Raises:
        LookupError: no page takes the module that defines it.
    """
    module = getattr(md, name).__module__
    for name_of_page, page in PAGES.items():
        if any(module == own or module.startswith(f"{own}.") for own in page.modules):
            return name_of_page
    raise LookupError(
        f"md.{name} of {module} is on no page of the reference: add its module to PAGES in "
        "docs/making/reference.py"
    )


def path_of(written: str) -> str:
    """Returns the path of a name from the root: `md.nn.mlp` is `meshdsl.nn.mlp`."""
    return written.replace("md.", "meshdsl.", 1) if written.startswith("md.") else written


def text_of(page: str) -> str:
    """Returns a page as Markdown; mkdocstrings fills it in."""
    about = PAGES.get(page) or MODULES[page]
    parts = [f"# {about.title}", about.says]
    for written, value in sorted(names_of(page), key=lambda pair: pair[0].lower()):
        parts.append(_entry(written, value))
    return "\n\n".join(parts) + "\n"


def _entry(written: str, value: Any) -> str:
    path = path_of(written)
    if _is_made(value) or not _is_code(value):  # its text is not in the source as a function's
        says = _says(value) if inspect.isfunction(value) else text_below(path)
        return f"### {written} {{ #{path} }}\n\n{_signature(written, value)}{says}"
    return f"::: {path}\n    options:\n      heading: {written}\n      toc_label: {written}"


def _is_made(value: Any) -> bool:
    """Whether a function is made by another one, as `sin` is by `unary`."""
    name = getattr(value, "__name__", "")
    made_there = getattr(value, "__module__", "") == broadcasting.__name__
    return made_there and f"\ndef {name}(" not in inspect.getsource(broadcasting)


def _is_code(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _signature(written: str, value: Any) -> str:
    if not inspect.isfunction(value):  # a type or a constant
        return f"```python\n{written} = {_constant(value)}\n```\n\n"
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(value).parameters.values()
    ]
    shown = inspect.Signature(bare)
    return f"```python\n{written}{shown}\n```\n\n"


def _says(value: Any) -> str:
    """Returns the docstring of a function as Markdown, with its example as a block of code."""
    return _SECTION.sub(_section, inspect.getdoc(value) or "").rstrip()


def _section(match: re.Match[str]) -> str:
    inner = textwrap.dedent(match[2]).strip()
    if match[1] == "Examples":
        return f"**Examples:**\n\n```pycon\n{inner}\n```\n"
    kind, _, why = inner.partition(": ")
    return f"**Raises:** `{kind}`: {' '.join(why.split())}\n\n"


def text_below(path: str) -> str:
    """Returns the string below the assignment of a type or a constant, in the source.

    The module of the path may import the name from another one, which is then read.

    Raises:
        LookupError: there is no such string.
    """
    module, _, name = path.rpartition(".")
    body = ast.parse(inspect.getsource(pkgutil.resolve_name(module))).body
    for statement, below in zip(body, [*body[1:], None], strict=True):
        imported = statement.names if isinstance(statement, ast.ImportFrom) else []
        if name in [alias.name for alias in imported]:
            return text_below(f"{statement.module}.{name}")
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        assigned = name in [getattr(target, "id", None) for target in targets]
        if assigned and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return inspect.cleandoc(str(below.value.value))
    raise LookupError(f"{path} has no text: write a string below its assignment in {module}")


def _constant(value: Any) -> str:
    """Returns a type or a constant as code writes it."""
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", repr(value))


def index() -> str:
    """Returns the first page of the reference: what is where."""
    lines = ["# Reference", "", "`import meshdsl as md` has the language.", ""]
    lines += ["| page | has |", "|---|---|"]
    for page in order():
        about = PAGES.get(page) or MODULES[page]
        names = ", ".join(
            f"[`{w.split('.')[-1]}`]({page}.md#{path_of(w)})" for w, _ in names_of(page)
        )
        lines.append(f"| [{about.title}]({page}.md) | {names} |")
    lines += [
        "| [Layout grammar](layout-grammar.md) | rules, scopes, meshes |",
        "| [Flags](flags.md) | every flag of every command |",
        "| [Files and exit codes](files.md) | what runs write and return |",
    ]
    return "\n".join(lines) + "\n"
