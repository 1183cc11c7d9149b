"""One of two processes that compile a program several times, for `test_kept`.

Takes a coordinator and this process's number. Prints one JSON object: what each time
compiled, warned of and computed.
"""

import json
import sys
import warnings
from pathlib import Path

import jax
import numpy as np

import meshdsl as md
from meshdsl.lowering.backends.jax import kept
from meshdsl.lowering.backends.jax.executable import Executable
from meshdsl.training.processes import code_version
from meshdsl.training.processes.code_version import remember
from meshdsl.training.processes.joining import joined

COMPILED = "/jax/core/compile/backend_compile_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
LOADED = "/jax/compilation_cache/cache_retrieval_time_sec"


def step(state, x):
    y = state + 0.1 * md.sin(x)
    return y, md.sum(y * y, "row")  # whose rows are on two processes


def main(coordinator, number):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    folder = Path(jax.config.jax_compilation_cache_dir) / f"process.{number}"
    with joined(coordinator, 2, number):
        sizes = md.spec([md.Dimension("row", 8), md.Dimension("column", 4)])
        program = md.jit(step, "data:4", "row:data", donate="state").lower(sizes, sizes)
        told = {"first": done(program), "again": done(program)}
        remember()  # as the template of a supervisor does
        told["named"] = done(program)
        told["by name"] = done(program)
        with jax.default_matmul_precision("highest"):
            told["in a context"] = done(program)
        told["out of it"] = done(program)
        (state, version), *_ = code_version._REMEMBERED
        code_version._REMEMBERED[:] = [(state, "another")]
        told["other code"] = done(program)
        code_version._REMEMBERED[:] = [("another state", version)]
        told["changed code"] = done(program)
        code_version._REMEMBERED.clear()
        before = {file: file.read_bytes() for file in folder.glob("*")}
        damage(folder, lambda content: content[:-1])
        told["cut short"] = done(program)
        told["replaced"] = done(program)
        damage(folder, lambda content: kept.hashlib.sha256(b"other").digest() + b"other")
        told["no program"] = done(program)
        versions, kept._versions = kept._versions, lambda: ["another", "one"]
        told["other versions"] = done(program)
        kept._versions = versions
        kept._abilities = lambda: ("flags: of another CPU",)
        told["other CPU"] = done(program)
        for file, content in before.items():
            assert file.exists()
            file.write_bytes(content)
        told["files"] = sorted(file.name for file in folder.glob("*"))
        print(json.dumps(told), flush=True)


def damage(folder, damaged):
    """Changes the content of all files, but for those that name others."""
    for file in folder.glob("*"):
        if file.suffix != ".name":
            file.write_bytes(damaged(file.read_bytes()))


def done(program):
    """Compiles the program and runs it twice; returns what is to be told of it."""
    counts = dict.fromkeys((COMPILED, LOWERED, LOADED), 0)

    def count(event, seconds, **rest):
        if event in counts:
            counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        executable = Executable(program, program.donated)
    compiled, lowered = counts[COMPILED] - counts[LOADED], counts[LOWERED]
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    state, x = (stored.put(values) for stored in executable.inputs)
    state, _ = executable.call_flat([state, x])  # the first one is a view of `values`
    assert executable.accepts([state, x]) and executable.direct is not None
    before = pointers(state)
    after, sums = executable.direct(state, x)
    reused = state.is_deleted() and not x.is_deleted() and pointers(after) == before
    shards = [np.asarray(shard.data).tobytes().hex() for shard in after.addressable_shards]
    memory = executable.memory_analysis()
    return {
        "compiled": compiled,
        "lowered": lowered,
        "warnings": [str(one.message) for one in warned],
        "reused": reused,
        "shards": shards,
        "sums": [np.asarray(shard.data).tobytes().hex() for shard in sums.addressable_shards],
        "memory": [memory.argument_size_in_bytes, memory.alias_size_in_bytes],
        "shardings": str(executable.compiled.input_shardings),
        "formats": str(executable.compiled.input_formats),
        "instructions": [name in executable.as_text() for name in ("all-reduce", "cosine")],
    }


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
