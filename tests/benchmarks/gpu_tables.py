"""Tables of costs for GPUs, from published measurements of single operations.

It reads copies of two sources that the user has; nothing is downloaded:

* aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0; a wheel of that name, `systems/data` in it):
  products in bfloat16, causal attention and NCCL's collectives on A100, H100, H200 and B200 SXM.
  Products and attention are measured in TensorRT-LLM, SGLang and vLLM. Of the three times of a
  product the median is taken; of attention, where servers add work of their own, the shortest.
  A product of a millisecond is measured at a clock that the limit of power does not allow for
  long: none is taken for faster, by its flops, than the largest one, which takes tens of these.
* cudnn-frontend 1.23 (NVIDIA, MIT; `benchmark` in its repository): attention with its gradients,
  and norms, which are bound by memory, on H200 and GB200.

The second source has neither A100 nor H100, and its Blackwell is a GB200, whose peak is 2,500
teraflops (data sheet of GB200 NVL72) and whose memory has the bandwidth of a B200. Derived are:

* norms of A100 and H100: those of an H200 at the same share of the bandwidth of memory.
* gradients of attention of an H100: those of an H200, whose peak is the same; of a B200: those of a
  GB200 at the same share of the peak; of an A100: as much slower than its forward pass as on H200.

Run: python -m tests.benchmarks.gpu_tables SYSTEMS_DATA CUDNN_FRONTEND
(writes layouts/tables/{a100,h100,h200,b200}.json)
"""

import csv
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshdsl.layouts import costs
from meshdsl.layouts.hardware import hardware

GPUS = ("a100", "h100", "h200", "b200")
PRODUCT_SIZES = (64, 256, 1024, 2048, 4096, 8192, 16384)
HEADS = (16, 64)  # of queries; of keys and values 8
KEY_HEADS = 8
BATCHES = (1, 4)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAYLOADS = tuple(2**power for power in range(10, 31, 2))  # bytes
GB200_FLOPS = 2500e12
NANOSECONDS = 1e6  # in a millisecond
KINDS = {"alltoall": "all_to_all"}
ORIGIN = (
    "measurements of single operations: aiconfigurator-core 0.12.0 (Apache-2.0: products, "
    "attention, NCCL) and cudnn-frontend 1.23 (MIT: gradients of attention, norms); "
    "see tests/benchmarks/gpu_tables.py"
)
Row = Mapping[str, Any]
Table = dict[tuple[int, ...], float]  # milliseconds by sizes


def newest(folder: Path, name: str) -> list[Path]:
    """Returns the files of a name for the newest version of each framework."""
    versions: dict[str, list[Path]] = {}
    for path in folder.glob(f"*/*/{name}"):
        versions.setdefault(path.parent.parent.name, []).append(path)
    return [max(paths, key=lambda path: _version(path.parent.name)) for paths in versions.values()]


def _version(text: str) -> list[int]:
    digits = "".join(letter if letter.isdigit() else " " for letter in text)
    return [int(number) for number in digits.split()]


def rows(path: Path) -> list[Row]:
    """Returns the rows of a file of aiconfigurator."""
    import pyarrow.parquet

    table: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    return table


def products(folder: Path) -> Table:
    """Returns products in bfloat16, by rows, inner and columns."""
    known: dict[tuple[int, ...], list[float]] = {}
    for path in newest(folder / "gemm", "gemm_perf.parquet"):
        for row in rows(path):
            if row["gemm_dtype"] == "bfloat16":
                known.setdefault((row["m"], row["k"], row["n"]), []).append(row["latency"])
    sizes = itertools.product(PRODUCT_SIZES, repeat=3)
    found = {size: statistics.median(known[size]) for size in sizes if size in known}
    largest = max(found, key=math.prod)
    sustained = math.prod(largest) / found[largest]
    return {size: max(time, math.prod(size) / sustained) for size, time in found.items()}


def attention(folder: Path) -> Table:
    """Returns causal attention in bfloat16, by matrices, length and features."""
    found: Table = {}
    for path in newest(folder / "attention", "context_attention_perf.parquet"):
        for row in rows(path):
            plain = not (row.get("window_size") or row.get("step"))
            half = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
            grouped = row["num_key_value_heads"] == KEY_HEADS and row["num_heads"] in HEADS
            sampled = row["batch_size"] in BATCHES and row["isl"] in LENGTHS
            if plain and half and grouped and sampled and row["head_dim"] in (64, 128, 256):
                sizes = row["batch_size"] * row["num_heads"], row["isl"], row["head_dim"]
                found[sizes] = min(row["latency"], found.get(sizes, float("inf")))
    return found


def collectives(folder: Path) -> dict[str, Table]:
    """Returns NCCL's collectives, by their kind, and by devices and payload."""
    found: dict[str, Table] = {kind: {} for kind in costs.COLLECTIVES}
    for path in newest(folder / "comm", "nccl_perf.parquet"):
        for row in rows(path):
            payload = row["message_size"] * 2  # elements of half precision
            if row["nccl_dtype"] == "half" and payload in PAYLOADS:
                kind = KINDS.get(row["op_name"], row["op_name"])
                found[kind][row["num_gpus"], payload] = row["latency"]
    return found


def lines(folder: Path, pattern: str) -> Iterator[Row]:
    """Yields the lines of cuDNN's measurements in bfloat16, of files that match a pattern."""
    for path in sorted((folder / "benchmark").glob(pattern)):
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                if (line["backend"], line["data_type"], line["success"]) == (
                    "cudnn",
                    "bfloat16",
                    "True",
                ):
                    yield line


def norms(folder: Path, kind: str) -> Table:
    """Returns norms, by the bytes that their forward pass reads and writes."""
    found: Table = {}
    for line in lines(folder, f"norms/results/{kind}/*.csv"):
        moved = 2 * 2 * int(line["N"]) * int(line["C"])
        time = moved / (float(line["fwd_gbps"]) * 1e9) * 1e3  # of more digits than its own time
        found[(moved,)] = min(time, found.get((moved,), float("inf")))
    return found


def trained_attention(folder: Path, pattern: str) -> tuple[Table, Table]:
    """Returns causal attention and its gradients, by matrices, length and features."""
    forward: Table = {}
    backward: Table = {}
    for line in lines(folder, f"sdpa_benchmark_training/results/{pattern}/*.csv"):
        if line["attn_mask"] != "top_left" or line["deterministic_bwd"] == "True":
            continue
        matrices = int(line["batch_size"]) * int(line["num_q_heads"])
        sizes = matrices, int(line["q_seqlen"]), int(line["head_dim_qk"])
        if line["model_name"] != "llama3.1":
            continue
        if "fwd_time_ms" in line:
            forward[sizes] = float(line["fwd_time_ms"])
            backward[sizes] = float(line["bwd_time_ms"])
        elif line["profile_pass"] == "fwd":
            forward[sizes] = float(line["time_ms"])
        else:
            backward[sizes] = float(line["time_ms"])
    return forward, backward


def scaled(table: Table, factor: float) -> Table:
    """Returns a table with all times longer."""
    return {sizes: time * factor for sizes, time in table.items()}


def families(name: str, systems: Path, cudnn: Path) -> dict[str, Table]:
    """Returns all families of a GPU."""
    kind, folder = hardware(name), systems / f"{name}_sxm"
    served = attention(folder)
    forward, backward = trained_attention(cudnn, "h200_919_only_cudnn")
    memory = norms(cudnn, "h200")
    if name == "b200":
        share = GB200_FLOPS / kind.flops[2]
        _, backward = trained_attention(cudnn, "llama3.1/gb200")
        backward, memory = scaled(backward, share), norms(cudnn, "gb200")
    else:
        memory = scaled(memory, hardware("h200").memory_bandwidth / kind.memory_bandwidth)
    if name == "a100":
        backward = {
            sizes: served[sizes] * backward[sizes] / forward[sizes]
            for sizes in backward
            if sizes in served
        }
    return {
        costs.PRODUCTS: products(folder),
        costs.ELEMENTWISE: memory,
        costs.ATTENTION: served,
        costs.GRADIENT[costs.ATTENTION]: backward,
        **collectives(folder),
    }


def main() -> None:
    """Writes the tables of all GPUs."""
    systems, cudnn = map(Path, sys.argv[1:3])
    for name in GPUS:
        found = {
            family: [[*sizes, round(time * NANOSECONDS)] for sizes, time in sorted(table.items())]
            for family, table in families(name, systems, cudnn).items()
        }
        path = costs.path_of(name)
        path.write_text(costs.to_json(name, ORIGIN, found, costs.NANOSECONDS))
        print(f"{path}: {', '.join(f'{len(table)} {family}' for family, table in found.items())}")


if __name__ == "__main__":
    main()
