"""The README's Python runs as it stands."""

import linecache
import re
from pathlib import Path

import jax
import numpy as np

import meshdsl as md
from meshdsl.training import Recipe, Reporting

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_code_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 7
    names: dict = {}
    with jax.enable_x64(False):
        for number, block in enumerate(blocks):
            name = f"README.md block {number}"
            # Tensors are called by the names that statements assign to, read off the source.
            linecache.cache[name] = len(block), None, block.splitlines(keepends=True), name
            exec(compile(block, name, "exec"), names)
    losses = names["result"].losses
    assert len(losses) == 50 and losses[-1] < losses[0]
    recipe = Recipe(names["init"], names["loss"], names["Lion"]())
    quiet = Reporting(quiet=True)
    own = names["train"](recipe, names["batches"](), steps=30, reporting=quiet)
    assert own.losses[-1] < own.losses[0]
    np.testing.assert_allclose(names["again"], names["y"], rtol=1e-6)
    assert [c.kind for c in names["program"].collectives] == ["all_reduce"]
    tiny = names["tiny"]
    program = md.jit(tiny.loss).lower(
        {"embedding": md.spec([names["vocab"], names["embed"]])}, tiny.batch_spec(2, 8)
    )
    assert program.block.outputs[0].shape == ()
