"""The benchmarks of the page, by section: what each measures, and its command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# What a benchmark leaves for its next run, or for another one. Git ignores it.
FOLDER = "build/benchmarks"


@dataclass(frozen=True)
class Benchmark:
    """What measures one thing.

    Attributes:
        name: of its record and its notes.
        title, about: what it measures, and against what.
        commands: run one after another in the repository's root; the page shows what the last one
            prints.
        needs: modules, or "gpu", without which it cannot run.
        lines: the most lines of the output that the page shows, the last ones.
    """

    name: str
    title: str
    about: str
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ()
    lines: int = 60

    @property
    def sources(self) -> list[Path]:
        """The files of the repository that its commands run."""
        words = [word for command in self.commands for word in command.split()]
        modules = [word for word in words if word.startswith("tests.benchmarks.")]
        return [ROOT / f"{module.replace('.', '/')}.py" for module in dict.fromkeys(modules)]


def _of(
    name: str,
    title: str,
    about: str,
    flags: str = "",
    before: tuple[str, ...] = (),
    **others: object,
) -> Benchmark:
    """Returns a benchmark that is a module of `tests.benchmarks`."""
    command = f"python -m tests.benchmarks.{name} {flags}".strip()
    return Benchmark(name, title, about, (*before, command), **others)  # type: ignore[arg-type]


_TPU = ("libtpu",)
_VERDICTS = f"python -m tests.benchmarks.verdicts --out={FOLDER}/verdicts.json"

SECTIONS: dict[str, tuple[Benchmark, ...]] = {
    "Bytes on the wire": (
        _of(
            "gspmd_bytes",
            "Whole training steps, against XLA's own partition",
            "MiB that one of 64 TPU v5p chips sends per step, counted in the HLO that the TPU "
            "compiler makes of our program and of `--backend=jax_auto`, which asks XLA for the same"
            " layouts. `tests/benchmarks/pairs.py` has the models and layouts.",
            needs=_TPU,
        ),
        _of(
            "tf_tpu_bytes",
            "TensorFlow's programs for TPUs",
            "What TensorFlow's programs send in the TPU compiler's HLO, beside what was planned.",
            needs=(*_TPU, "tensorflow"),
        ),
    ),
    "Memory": (
        _of(
            "memory",
            "The planned peak, against the TPU compiler's",
            "`program.peak_bytes` of the same pairs, beside the TPU compiler's own account.",
            needs=_TPU,
        ),
        _of(
            "image_memory",
            "Spatial convolutions with few features",
            "The planned peak of two 3-D U-Nets that are split in depth, beside the TPU "
            "compiler's.",
            flags="--compile",
            needs=_TPU,
        ),
    ),
    "Time of a step": (
        _of(
            "verdicts",
            "The TPU compiler's schedule",
            "Milliseconds of a step on 64 v5p by the compiler's own schedule, and how much of them "
            "the device waits: ours with what time decides, XLA's own partition, and plain JAX "
            "written by hand, each with the compiler's flags that are best for it. It goes on where"
            " it stopped, and takes hours.",
            flags=f"--out={FOLDER}/verdicts.json",
            needs=_TPU,
        ),
        _of(
            "step_time",
            "On two cores, against plain JAX",
            "A training step beside the same step written by hand with `jax.jit` and "
            "`NamedSharding`, interleaved: medians of the ratios.",
        ),
        _of(
            "gspmd_time",
            "On eight virtual devices, against XLA's own partition",
            "The pairs at small sizes, interleaved with `--backend=jax_auto`.",
        ),
        _of(
            "pipeline_time",
            "Pipelines, against GPipe by hand",
            "A step as a pipeline on virtual devices, beside GPipe by differentiating a scan in "
            "hand-written JAX.",
        ),
        _of(
            "expert_time",
            "Experts, against plain JAX",
            "A training step with experts beside the same steps written by hand.",
        ),
        _of(
            "tf_time",
            "TensorFlow, against DTensor and Mesh-TensorFlow",
            "A training step on eight logical CPUs, medians of interleaved ratios. It needs a "
            "folder with Mesh-TensorFlow 0.1.21.",
            flags=f"--mesh_tensorflow={FOLDER}/mesh_tensorflow",
            needs=("tensorflow", "mesh_tensorflow"),
        ),
        _of(
            "gpu_time",
            "A GPU, against plain JAX and as predicted",
            "GPT-2 small and a Llama of 1.2 B parameters in bfloat16 on one GPU, beside the same "
            "models in plain JAX with its fused attention, and beside what a calibration predicts.",
            flags=f"--hardware={FOLDER}/gpu.json",
            before=(f"meshdsl calibrate --out={FOLDER}/gpu.json",),
            needs=("gpu",),
        ),
        _of(
            "decode_time",
            "A step of decoding, against loops by hand",
            "GPT-2 small beside three loops over static caches that are written by hand in plain "
            "JAX; the fastest counts. These are its sizes for a CPU, in processor time.",
            flags="--small --processor",
        ),
        _of(
            "paged_time",
            "Rows that share pages, against rows with caches of their own",
            "Steps of eight texts of a GPT-2, and the memory of their caches, where pages have "
            "half of the slots. These are its sizes for a CPU, in processor time.",
            flags="--small --processor",
        ),
        _of(
            "choice_time",
            "Multiple choice",
            "Log probabilities of four continuations after each context: contexts that are read "
            "once, and once for each continuation.",
        ),
    ),
    "Predictions": (
        _of(
            "simulated_verdicts",
            "The simulated step, against the TPU compiler's schedule",
            "What `explain` says before any compiler, beside the compiler's schedule of the same "
            "program on 64 v5p. Nothing is fitted to these steps.",
            flags=f"{FOLDER}/verdicts.json",
            before=(f"{_VERDICTS} --kind=jax",),
            needs=_TPU,
        ),
        _of(
            "published",
            "Published steps, zero-shot",
            "The simulated steps of published measurements: the mean error by table, and, each with"
            " one number from the table's other rows, that of the simulation scaled and of one "
            "share of the peak for all.",
            lines=90,
        ),
        _of(
            "calibrated_order",
            "The order of 30 layouts on this machine",
            "The step of a small model on eight virtual CPU devices, predicted by a calibration and"
            " measured in turn. Nothing is fitted to steps.",
            flags=f"{FOLDER}/cpu.json",
            before=(f"meshdsl calibrate --host_devices=8 --out={FOLDER}/cpu.json",),
        ),
    ),
    "Time until a step runs": (
        _of(
            "compile_time",
            "Tracing, lowering and compiling",
            "What waits before the first step of gpt_mini, by its number of layers.",
        ),
        _of(
            "lowering_time",
            "Tracing and lowering, by size",
            "Processor time by separate parameters, mesh axes, globs and rules.",
        ),
        _of(
            "call_time",
            "A call of a compiled function, against `jax.jit`",
            "Processor time of the host, ours and JAX's, interleaved.",
        ),
        _of(
            "eager_time",
            "Operations outside of traced functions, against jax.numpy",
            "Processor time of one operation, interleaved.",
        ),
        Benchmark(
            "explain",
            "`meshdsl explain` of gpt3_175b",
            "Processor time of the whole process (see the stamp), with the single changes that it "
            "tries for its advice.",
            (
                'meshdsl explain --model=gpt3_175b --mesh_shape="data:64,model:8" '
                '--layout="batch:data; heads:model; d_ff:model; vocab:model; length:model?; '
                'params/embed:data" --hardware=v5p',
            ),
            lines=75,
        ),
        _of(
            "evaluation_time",
            "One evaluation where time decides",
            "Processor time of one changed decision, written and simulated. The goal is 5 ms.",
        ),
        _of(
            "plans",
            "`meshdsl plan`",
            "Plans that are found on v5p: processor time, certificate (how far the plan may be from"
            " the best of its space) and simulated step.",
        ),
        _of(
            "sweep_time",
            "`meshdsl sweep` by plan",
            "100 layouts of gpt3_175b on 512 devices, planned and ranked, with a page for each.",
        ),
    ),
    "Runs": (
        _of(
            "kills",
            "A job of several processes under kills",
            "SIGKILL of any of four processes with copies in memory: at the start, in steps, in "
            "collectives, in copies, in saves, in the start after a kill.",
            flags="--kills=36 --seed=11",
        ),
        _of(
            "recovery",
            "A host of four is lost, and comes again",
            "How long no step is finished until three go on on a smaller mesh, and until all four "
            "do again. Each has one process, on this machine.",
        ),
        _of(
            "copy_cost",
            "What copies in memory cost where nothing fails",
            "Steps with a copy of the state after each (`--host_copies`) take turns with steps "
            "without.",
        ),
        _of(
            "save_blocks",
            "How long a save blocks training",
            "Of the time that it takes, beside steps that go on.",
        ),
        _of(
            "data_wait",
            "Waiting for data",
            "The share of its time that training of gpt_mini waits.",
            flags="--workers=4",
        ),
        _of(
            "serve_load",
            "Many requests at once to `meshdsl serve`",
            "Whether their texts are right, and the server stays up.",
        ),
        _of(
            "precision_loss",
            "Training with products in 8 bits",
            "The loss of gpt_mini after 500 steps, beside that in bfloat16.",
            flags="--steps=500 fp8 int8 int8,embedding:-",
        ),
    ),
}

BENCHMARKS: dict[str, Benchmark] = {
    one.name: one for section in SECTIONS.values() for one in section
}
