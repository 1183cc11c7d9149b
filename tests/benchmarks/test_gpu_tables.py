"""How published measurements become tables of costs for GPUs."""

import pytest

from tests.benchmarks import gpu_tables
from tests.benchmarks.gpu_tables import attention, collectives, newest, norms, products
from tests.benchmarks.gpu_tables import trained_attention as trained

pyarrow = pytest.importorskip("pyarrow")


def measured(folder, family, framework, version, name, lines):
    """Writes a file as aiconfigurator has them."""
    import pyarrow.parquet

    path = folder / family / framework / version / name
    path.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), path)


def product(m, k, n, latency, dtype="bfloat16"):
    return {"gemm_dtype": dtype, "m": m, "k": k, "n": n, "latency": latency}


def test_of_each_framework_the_newest_version_is_read(tmp_path):
    for version in ("0.5.9", "0.5.10", "0.5.10.rc1"):
        measured(tmp_path, "gemm", "sglang", version, "x.parquet", [product(64, 64, 64, 1.0)])
    measured(tmp_path, "gemm", "vllm", "0.24.0", "x.parquet", [product(64, 64, 64, 1.0)])
    found = {path.parent.name for path in newest(tmp_path / "gemm", "x.parquet")}
    assert found == {"0.5.10.rc1", "0.24.0"}


def test_products_are_the_median_of_the_frameworks(tmp_path):
    for framework, time in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        lines = [product(64, 256, 1024, time), product(64, 64, 64, 9.0, "fp8")]
        lines.append(product(63, 64, 64, 9.0))  # no size of the table
        measured(tmp_path, "gemm", framework, "1", "gemm_perf.parquet", lines)
    assert products(tmp_path) == {(64, 256, 1024): 2.0}


def test_no_product_is_faster_than_the_largest_for_long(tmp_path):
    lines = [product(64, 64, 64, 0.5), product(64, 64, 256, 1.0), product(64, 64, 1024, 16.0)]
    measured(tmp_path, "gemm", "a", "1", "gemm_perf.parquet", lines)
    assert products(tmp_path) == {(64, 64, 64): 1.0, (64, 64, 256): 4.0, (64, 64, 1024): 16.0}


def test_attention_is_the_shortest_of_those_without_a_window(tmp_path):
    line = {
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "batch_size": 4,
        "isl": 1024,
        "num_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "window_size": 0,
        "latency": 2.0,
    }
    lines = [line, {**line, "latency": 3.0}, {**line, "window_size": 128, "latency": 1.0}]
    lines += [{**line, "attn_dtype": "fp8", "latency": 1.0}, {**line, "isl": 17, "latency": 1.0}]
    measured(tmp_path, "attention", "vllm", "1", "context_attention_perf.parquet", lines)
    assert attention(tmp_path) == {(64, 1024, 128): 2.0}


def test_messages_are_counted_in_elements_and_payloads_in_bytes(tmp_path):
    line = {"nccl_dtype": "half", "op_name": "alltoall", "num_gpus": 8, "latency": 0.5}
    lines = [{**line, "message_size": 2**19}, {**line, "message_size": 2**20}]
    lines.append({**line, "nccl_dtype": "int8", "message_size": 2**20, "latency": 7.0})
    measured(tmp_path, "comm", "nccl", "2.29.2", "nccl_perf.parquet", lines)
    found = collectives(tmp_path)
    assert found["all_to_all"] == {(8, 2**20): 0.5}
    assert found["all_gather"] == {}


def test_norms_are_bound_by_the_bytes_they_read_and_write(tmp_path):
    folder = tmp_path / "benchmark/norms/results/h200"
    folder.mkdir(parents=True)
    head = "backend,data_type,success,N,C,fwd_gbps\n"
    lines = "cudnn,bfloat16,True,1024,1000,4096\npytorch,bfloat16,True,1024,1000,9999\n"
    (folder / "all.csv").write_text(head + lines + "cudnn,bfloat16,False,1024,1000,1\n")
    assert norms(tmp_path, "h200") == {(4096000,): pytest.approx(1e-3)}


@pytest.mark.parametrize("of_both", [True, False])
def test_attention_and_its_gradients_are_read_in_both_forms(tmp_path, of_both):
    folder = tmp_path / "benchmark/sdpa_benchmark_training/results/x"
    folder.mkdir(parents=True)
    head = "model_name,backend,data_type,success,attn_mask,deterministic_bwd,batch_size,num_q_heads"
    head += ",q_seqlen,head_dim_qk,"
    line = "llama3.1,cudnn,bfloat16,True,top_left,False,2,64,2048,128,"
    other = line.replace("top_left", "no_mask")
    if of_both:
        text = f"{head}fwd_time_ms,bwd_time_ms\n{line}1.5,4.5\n{other}9,9\n"
    else:
        text = f"{head}profile_pass,time_ms\n{line}fwd,1.5\n{line}bwd,4.5\n"
        text += line.replace("False", "True") + "bwd,9\n" + f"{other}bwd,9\n"
    (folder / "a.csv").write_text(text)
    assert trained(tmp_path, "x") == ({(128, 2048, 128): 1.5}, {(128, 2048, 128): 4.5})


def test_every_gpu_has_a_table():
    from meshdsl.layouts.costs import costs_of

    assert all(costs_of(name).origin == gpu_tables.ORIGIN for name in gpu_tables.GPUS)
