"""Golden plans: what lowering decides for a model on a mesh in a layout, as text to review.

A plan lists where the parameters are and every collective with its function; one file per plan
stands beside this one. After a change that is meant, run `python -m tests.golden.plans` and read
the diff.
"""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.models import load
from meshdsl.optim import AdamW
from meshdsl.reports.explain import explain
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step

HERE = Path(__file__).parent
UPDATE = "python -m tests.golden.plans"
MEGATRON = "batch:data; heads:model; d_ff:model; vocab:model"


@dataclass(frozen=True)
class Plan:
    """A training step: a named model with changes, on a mesh, in a layout."""

    model: str
    mesh: str
    layout: str
    args: str = ""
    batch: int | None = None
    options: Options = field(default_factory=Options)
    microbatches: int = 1

    def jitted(self):
        """Returns the step, with AdamW and clipping as the command line has them, and its specs."""
        model = load(self.model, self.args)
        optimizer = AdamW(1e-3)
        step = make_train_step(model.loss, optimizer, 1.0, microbatches=self.microbatches)
        state = spec_of(create(model.init, optimizer))
        batch = model.batch_spec(self.batch or model.batch_size, model.length)
        jitted = md.jit(step, self.mesh, self.layout, donate="state", options=self.options)
        return jitted, (state, batch)

    def program(self):
        """Returns the lowered step."""
        jitted, specs = self.jitted()
        return jitted.lower(*specs)

    def text(self):
        """Returns the plan as it is reviewed."""
        program = self.program()
        told = explain(program)
        head = [
            f"model   {self.model} {self.args}".rstrip(),
            f"mesh    {self.mesh}",
            f"layout  {self.layout}",
        ]
        if self.options != Options():
            chosen = {f.name: getattr(self.options, f.name) for f in fields(Options)}
            usual = vars(Options())
            rows = [f"{k}={v!r}" for k, v in chosen.items() if v != usual[k]]
            head.append(f"options {', '.join(rows)}")
        if self.microbatches > 1:
            head.append(f"microbatches {self.microbatches}")
        rows = [
            (one.path, str(one.value.shape), where(one.value.layout)) for one in told.parameters
        ]
        moved = [
            (
                one.phase,
                one.kind,
                "+".join(one.axes),
                str(one.dims),
                f"x{one.count}",
                f"{one.payload_bytes:,} B",
                f"{one.wire_bytes:,.0f} B",
                site(one.source),
            )
            for one in told.traffic
        ]
        total = f"sent per device and step: {program.wire_bytes:,.0f} B"
        return "\n".join(
            [*head, "", "parameters", *columns(rows), "", "collectives", *columns(moved), total, ""]
        )


def where(layout):
    """Returns a layout as rules: `embed:data heads:model`, or `whole`."""
    return " ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in layout.splits) or "whole"


def site(source):
    """Returns whose line it is, which changes less often than the line's number does."""
    file = source.place.rpartition(":")[0]
    return f"{file} {source.function}" + (" (backward)" if source.backward else "")


def columns(rows):
    """Returns rows as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  " + "  ".join(cells).rstrip() for cells in padded] or ["  none"]


PLANS = {
    "gpt_mini_data": Plan("gpt_mini", "data:8", "batch:data"),
    "gpt_mini_tensor": Plan("gpt_mini", "data:2,model:4", MEGATRON),
    "gpt_mini_sequence": Plan("gpt_mini", "data:2,model:4", f"{MEGATRON}; length:model?"),
    "gpt_mini_zero1": Plan("gpt_mini", "data:8", "batch:data; optimizer/embed:data"),
    "gpt_mini_fsdp": Plan("gpt_mini", "data:8", "batch:data; params/embed:data"),
    "gpt_mini_fsdp_kept": Plan(
        "gpt_mini", "data:8", "batch:data; params/embed:data", options=Options(weights="keep")
    ),
    "gpt_mini_all_to_all": Plan(
        "gpt_mini", "context:4", "heads:context; length:context?; params/heads:-"
    ),
    "gpt_mini_ring": Plan(
        "gpt_mini",
        "data:2,context:4",
        "batch:data; length:context; memory_length:context",
        options=Options(context="ring"),
    ),
    "gpt_mini_slices": Plan(
        "gpt_mini", "slice@dcn:2,data:2,model:2", MEGATRON.replace("data", "slice+data", 1)
    ),
    "gpt_mini_microbatches": Plan("gpt_mini", "data:2,model:4", MEGATRON, microbatches=4),
    "gpt_mini_pipeline": Plan(
        "gpt_mini",
        "pipe:2,data:2,model:2",
        f"layers:pipe; {MEGATRON.replace('vocab:model', 'vocab:model+pipe')}; length:model?",
        microbatches=8,
    ),
    "gpt_mini_pipeline_rounds": Plan(
        "gpt_mini",
        "pipe:2",
        "layers:pipe",
        options=Options(pipeline_rounds=2),
        microbatches=4,
    ),
    "gpt_mini_remat": Plan("gpt_mini", "data:2,model:4", MEGATRON, args="remat=keep_collectives"),
    "bert_mini_tensor": Plan("bert_mini", "data:2,model:4", MEGATRON),
    "t5_mini_tensor": Plan("t5_mini", "data:2,model:4", MEGATRON),
    "mixtral_mini_experts": Plan(
        "mixtral_mini", "data:2,expert:4", "batch:data+expert?; experts:expert"
    ),
    "unet3d_mini_space": Plan("unet3d_mini", "rows:2,cols:2", "height:rows; width:cols"),
    "gpt3_175b_pod": Plan(
        "gpt3_175b",
        "data:128,model:8",
        f"{MEGATRON}; length:model?; params/embed:data",
        batch=1024,
    ),
}


def file_of(name):
    """Returns the file of a plan."""
    return HERE / f"{name}.txt"


def main():
    """Writes all files, or those of the plans named, and says which have changed."""
    for name in sys.argv[1:] or PLANS:
        path, text = file_of(name), PLANS[name].text()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.name}")
    for path in sorted(HERE.glob("*.txt")):
        if path.stem not in PLANS:
            path.unlink()
            print(f"removed {path.name}")


if __name__ == "__main__":
    main()
