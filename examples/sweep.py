"""A sweep of one's own: a training step on many meshes and layouts, from flags of an absl program.

    python examples/sweep.py --mesh_shape=data:64 --mesh_shape=data:8,model:8 \
        --layout='batch:data;d_ff:model' --layout=batch:data --layout='batch:data;params/embed:data'

Each layout is planned on each mesh. What a device computes, sends and holds, and how long a step
takes on `--hardware`, is known without running anything, so the meshes may be larger than this
machine. With `--run` the steps are measured too, on meshes that fit it (`--host_devices=8` makes
virtual devices). What does not fit together is told below the table.

In the table of this command the first row, tensor parallelism, sends 31.5 MiB per device and holds
40.5. Data parallelism alone sends 252 MiB and holds 320. With parameters in shards (FSDP) it holds
37.6 and sends 378.
"""

import csv
import itertools
import time

from absl import app, flags

import meshdsl as md
from meshdsl import nn

FLAGS = flags.FLAGS
# Meshes have commas and layouts have semicolons, so each has a flag that may be given again.
flags.DEFINE_multi_string("mesh_shape", ["data:8", "data:2,model:4"], "Mesh axes and their sizes.")
flags.DEFINE_multi_string("layout", ["batch:data"], "Dims split over mesh axes.")
flags.DEFINE_integer("batch", 512, "Examples of a step.", lower_bound=1)
flags.DEFINE_integer("embed", 1024, "Features of an example.", lower_bound=1)
flags.DEFINE_integer("layers", 4, "Layers of the model.", lower_bound=1)
flags.DEFINE_string("hardware", "v5p", "What the time is simulated for, or a file of calibrate.")
flags.DEFINE_bool("run", False, "Measure the steps on the devices of this machine.")
flags.DEFINE_integer("host_devices", None, "Make this many virtual CPU devices.", lower_bound=1)
flags.DEFINE_string("out", None, "A CSV file for the table.")
# Of the table; each with its width.
COLUMNS = dict.fromkeys(["Gflop", "MiB held", "MiB sent", "ms", "ms measured"], ">12.3f")
COLUMNS = {"mesh": "24", "layout": "34", **COLUMNS}


class Mlp(md.Module):
    """Layers that each add something to what they are given."""

    w_in: md.Tensor  # layers, embed, d_ff
    w_out: md.Tensor  # layers, d_ff, embed

    def __call__(self, x):  # batch, embed
        def layer(x, w):
            h = md.gelu(md.einsum(x, w.w_in, over="embed"))
            return x + md.einsum(h, w.w_out, over="d_ff"), None

        return md.scan(layer, x, self, dim="layers")[0]


def step(params, x, y):  # the names of arguments begin the paths of their tensors: params/w_in
    """Returns the parameters after a step of gradient descent, and the loss before it."""
    loss, slopes = md.value_and_grad(lambda params: md.mean(md.square(params(x) - y)))(params)
    w_in, w_out = params.w_in - 0.1 * slopes.w_in, params.w_out - 0.1 * slopes.w_out
    return {"params": Mlp(w_in, w_out), "loss": loss}


def dims_of():
    """Returns the dims of `w_in`, of `w_out`, and of a batch."""
    sizes = {"layers": FLAGS.layers, "embed": FLAGS.embed, "d_ff": 4 * FLAGS.embed}
    layers, embed, d_ff, batch = md.dims(**sizes, batch=FLAGS.batch)
    return [layers, embed, d_ff], [layers, d_ff, embed], [batch, embed]


def start(key):
    """Returns the first arguments of a step, made on the devices that hold them."""
    w_in, w_out, batch = dims_of()
    keys = md.random.split(key, 4)
    params = Mlp(
        nn.initializers.fan_in("embed")(keys[0], w_in),
        nn.initializers.fan_in("d_ff", gain=0.1)(keys[1], w_out),
    )
    x, y = (md.random.normal(key, batch) for key in keys[2:])
    return {"params": params, "x": x, "y": y}


def milliseconds(run, mesh, layout):
    """Returns how long a step takes, the least of five."""
    given = md.jit(start, mesh, layout)(md.random.key(0))
    times = []
    for _ in range(6):  # the first one compiles
        begun = time.perf_counter()
        done = run(**given)
        float(done["loss"])  # waits for the devices
        times.append(1e3 * (time.perf_counter() - begun))
        given["params"] = done["params"]
    return min(times[1:])


def sweep():
    """Returns a row for each mesh and layout, the best first, and what does not fit."""
    w_in, w_out, batch = (md.spec(dims) for dims in dims_of())
    traced, rows, problems = md.jit(step), [], []
    for mesh, layout in itertools.product(FLAGS.mesh_shape, FLAGS.layout):
        run = traced.on(mesh, layout)  # traced once, planned for each
        try:
            program = run.lower(Mlp(w_in, w_out), batch, batch)
            taken = milliseconds(run, mesh, layout) if FLAGS.run else 0.0
        except ValueError as error:
            problems.append(f"{mesh} | {layout}\n{error}")
            continue
        held, sent = program.peak_bytes / 2**20, program.wire_bytes / 2**20
        cells = program.flops / 1e9, held, sent, 1e3 * program.seconds(FLAGS.hardware), taken
        rows.append(dict(zip(COLUMNS, (mesh, layout, *cells), strict=True)))
    return sorted(rows, key=lambda row: (row["ms measured"], row["ms"])), problems


def main(_):
    if FLAGS.host_devices:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", FLAGS.host_devices)
    rows, problems = sweep()
    columns = [*COLUMNS.items()] if FLAGS.run else [*COLUMNS.items()][:-1]
    print("".join(f"{name:{width.removesuffix('.3f')}}" for name, width in columns))
    for row in rows:
        print("".join(f"{row[name]:{width}}" for name, width in columns))
    print(*problems, sep="\n\n")
    if FLAGS.out:
        with open(FLAGS.out, "w", newline="") as file:
            writer = csv.DictWriter(file, dict(columns), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    app.run(main)
