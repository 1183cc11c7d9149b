"""Late: the few calls that go up the house, each under a name of its own.

Modules import one way only, from the top of the house to the bottom. Some things below need what
stands above them: a graph prints itself, a program knows its memory, an operation outside of a
trace runs at once. `CALLS` lists them all. Nothing is imported before its call is made.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

CALLS = {
    # Tensors have the operations as methods; operations are made of tensors.
    "operations": "meshdsl.ops",
    # The gradient of a product is made of cumulative products, and these of elementwise operations.
    "cumulative products": "meshdsl.ops.reductions.cumulative",
    # Operations on arrays run at once, as small programs.
    "run at once": "meshdsl.running.eager:run",
    # What a graph, a program and its reports say of themselves.
    "graph as text": "meshdsl.tracing.printing:show",
    "program as text": "meshdsl.reports.explain.printing:show",
    "program explained": "meshdsl.reports.explain:explain",
    "explanation as text": "meshdsl.reports.explain.text:show",
    "comparison as text": "meshdsl.reports.explain.comparison_text:show",
    "report as page": "meshdsl.reports.explain.html.page:page",
    "report as fragment": "meshdsl.reports.explain.html.page:fragment",
    "value in a notebook": "meshdsl.reports.notebook.values:show",
    # The mesh and the layout that `auto` stands for.
    "layout of a graph": "meshdsl.search.automatic:for_graph",
    "layout of a recipe": "meshdsl.search.automatic:for_recipe",
    # Weights and models of Hugging Face; models are written in the language.
    "folders of Hugging Face": "meshdsl.models.huggingface",
    # What a program costs, computed when it is asked for.
    "memory of a program": "meshdsl.lowering.costs.memory:memory",
    "flops of a program": "meshdsl.lowering.costs.flops:flops",
    "time of a program": "meshdsl.lowering.costs.simulation:step_seconds",
    # Which code a process has imported, as the one that started it has noted.
    "version of the loaded code": "meshdsl.training.processes.code_version:loaded",
}


@functools.cache
def late(name: str) -> Any:
    """Returns the function, or the module, that `CALLS` has by a name: `late("graph as text")`."""
    module, _, function = CALLS[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, function) if function else found
