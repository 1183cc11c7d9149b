"""Plans that `meshdsl plan` finds: how long it takes, how good they surely are, and others beside.

For each model there is one row: the processor time of the process, the certificate (how far the
plan may be from the best of its space) and the simulated time of a step. With `--others`, every
model also has the steps of layouts that people use: data parallelism, FSDP, and tensor and sequence
parallelism as in README and in Megatron-LM, on 4 and 8 devices. Each of these has the number of
microbatches and the remat with which it is the fastest that fits, by the same simulation.

Run: python -m tests.benchmarks.plans [--others] [--models=llama_7b,t5_base]
"""

import argparse
import json
import math
import resource
import subprocess
import sys

CASES = {
    "llama_7b": ("--topology=v5p:4x4x4", "--batch_tokens=1048576"),
    "gpt3_175b": ("--topology=v5p:8x8x16", "--batch_tokens=3145728"),
    "mixtral_8x7b": ("--topology=v5p:4x4x8",),
    "t5_base": ("--topology=v5p:4x4x4",),
    "resnet50": ("--topology=v5p:4x4x4",),
    "unet3d": ("--topology=v5p:4x4x4",),
}
_TENSOR = "batch:data; heads:model; d_ff:model; vocab:model; length:model?"
OTHERS = {
    "data parallel": ("data:{all}", "batch:data"),
    "ZeRO-1": ("data:{all}", "batch:data; optimizer/embed:data"),
    "FSDP": ("data:{all}", "batch:data; params/embed:data"),
    "README": ("data:{eighth},model:8", f"{_TENSOR}; params/embed:data"),
    "Megatron, 4 tensor": ("data:{quarter},model:4", f"{_TENSOR}; optimizer/embed:data"),
    "Megatron, 8 tensor": ("data:{eighth},model:8", f"{_TENSOR}; optimizer/embed:data"),
}
_OF_IMAGES = ("resnet50", "unet3d")


def plan(model: str, *flags: str) -> tuple[float, dict]:
    """Returns the processor time of `meshdsl plan`, and its report as values."""
    code = "import sys; from meshdsl.cli.main import run; sys.exit(run(sys.argv[1:]))"
    arguments = ["plan", f"--model={model}", *CASES[model], *flags, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, json.loads(done.stdout)


def devices(model: str) -> int:
    """Returns the number of devices of a case."""
    sizes = CASES[model][0].rpartition(":")[2]
    return math.prod(map(int, sizes.split("x")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--models", default=",".join(CASES))
    asked = parser.parse_args()
    for model in asked.models.split(","):
        seconds, found = plan(model)
        best = found["best"]
        print(
            f"{model:<14} {seconds:6.1f} s  certificate {found['gap']:7.1%}  "
            f"step {best['seconds'] * 1e3:9.2f} ms  {best['mesh']} | {best['layout']}",
            flush=True,
        )
        if not asked.others or model in _OF_IMAGES:
            continue
        count = devices(model)
        for name, (mesh, layout) in OTHERS.items():
            shape = mesh.format(all=count, quarter=count // 4, eighth=count // 8)
            _, other = plan(model, f"--mesh_shape={shape}", f"--layout={layout}")
            if "best" not in other:
                print(f"    {name:<20} does not fit")
                continue
            step = other["best"]["seconds"]
            print(
                f"    {name:<20} {step * 1e3:9.2f} ms  {step / best['seconds']:.2f} x", flush=True
            )


if __name__ == "__main__":
    main()
