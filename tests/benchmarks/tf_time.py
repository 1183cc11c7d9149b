"""Time of a training step on TensorFlow: ours, Mesh-TensorFlow 0.1.21's and TF DTensor's.

All take the same step (loss, gradients, update) of the same layers from the same weights, split in
the same way over eight logical CPU devices of one process, with TensorFlow's default threads. Each
has a process of its own, since Mesh-TensorFlow needs the graphs and sessions of TensorFlow 1; they
take turns, and what counts is the median of the ratios of neighbouring turns. Their losses must
agree, and fall alike. The time of the matrix products alone, without anything around them, tells
what no program on these cores can fall below.

DTensor takes every layout that is asked for here. Mesh-TensorFlow is not among our requirements:

    pip install --target=/path --no-deps mesh-tensorflow==0.1.21 gin-config
    python -m tests.benchmarks.tf_time --mesh_tensorflow=/path [--problem=NAME] [--rounds=15]

Also printed, for ours: how large the graph of a device is and what waits before the first step, at
several depths, and what a call costs the host beyond TensorFlow's own.
"""

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import numpy as np
import tensorflow as tf

import meshdsl as md

Problem = Literal["mlp", "transformer"]
Run = Callable[[int], Sequence[float]]  # takes a number of steps, and returns their losses
Weights = Mapping[str, Any]

MESH = "data:2,model:4"
AXES = {"batch": "data", "hidden": "model", "heads": "model"}
RATE = 0.01
SIZES = {
    "mlp": {"batch": 256, "d_in": 512, "hidden": 2048, "d_out": 512},
    "transformer": {
        "batch": 16, "length": 64, "d_model": 512, "heads": 8, "d_kv": 64, "hidden": 2048
    },
}  # fmt: skip
DATA = {"mlp": ("batch d_in", "batch d_out"), "transformer": ("batch length d_model",) * 2}
WEIGHTS = {  # the dims that are summed over, and the others
    "mlp": {
        "w_in": ("d_in", "hidden"),
        "b_in": ("", "hidden"),
        "w_out": ("hidden", "d_out"),
        "b_out": ("", "d_out"),
    },
    "transformer": {
        "query": ("d_model", "heads d_kv"),
        "key": ("d_model", "heads d_kv"),
        "value": ("d_model", "heads d_kv"),
        "out": ("heads d_kv", "d_model"),
        "w_in": ("d_model", "hidden"),
        "w_out": ("hidden", "d_model"),
    },
}
PRODUCTS = "products alone"
FIRST = 10  # steps before the first round, whose losses are compared


def dims_of(problem: str) -> dict[str, list[str]]:
    """Returns the dims of the weights, by name, and of the data, x and y."""
    found = {
        name: [*over.split(), *kept.split()] for name, (over, kept) in WEIGHTS[problem].items()
    }
    return {**found, **dict(zip("xy", map(str.split, DATA[problem]), strict=True))}


def arrays(problem: str, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Returns the first weights and the data: normal numbers, weights scaled by their fan-in."""
    rng = np.random.default_rng(0)
    found = {}
    for name, dims in dims_of(problem).items():
        over = WEIGHTS[problem].get(name, ("", ""))[0].split()
        scale = math.prod(sizes[dim] for dim in over) ** -0.5
        drawn = scale * rng.standard_normal([sizes[dim] for dim in dims])
        found[name] = drawn.astype(np.float32)
    return found


# Ours.


def our_mlp(w: Weights, x: md.Tensor) -> md.Tensor:
    h = md.relu(md.einsum(x, w["w_in"], over="d_in") + w["b_in"])
    return md.einsum(h, w["w_out"], over="hidden") + w["b_out"]


def our_norm(x: md.Tensor) -> md.Tensor:
    return x * md.rsqrt(md.mean(md.square(x), "d_model") + 1e-6)


def written_out(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> md.Tensor:
    """Returns attention in as many operations as the others use."""
    scores = md.einsum(q, k, over="d_kv") * q.shape.get("d_kv").size ** -0.5
    return md.einsum(md.softmax(scores, "memory_length"), v, over="memory_length")


def in_one(q: md.Tensor, k: md.Tensor, v: md.Tensor) -> md.Tensor:
    """Returns attention as our one operation."""
    return md.attention(q, k, v, over="memory_length", features="d_kv")


def our_transformer(w: Weights, x: md.Tensor, attention: Callable = written_out) -> md.Tensor:
    h = our_norm(x)
    q = md.einsum(h, w["query"], over="d_model")
    k, v = (
        md.rename(md.einsum(h, w[name], over="d_model"), length="memory_length")
        for name in ("key", "value")
    )
    x = x + md.einsum(attention(q, k, v), w["out"], over=["heads", "d_kv"])
    h = md.relu(md.einsum(our_norm(x), w["w_in"], over="d_model"))
    return x + md.einsum(h, w["w_out"], over="hidden")


def our_step(model: Callable[[Weights, md.Tensor], md.Tensor]) -> Callable:
    """Returns a training step of a model."""

    def step(weights: Weights, x: md.Tensor, y: md.Tensor) -> tuple[Weights, md.Tensor]:
        def loss(weights: Weights) -> md.Tensor:
            return md.mean(md.square(model(weights, x) - y))

        value, gradients = md.value_and_grad(loss)(weights)
        return {name: w - RATE * gradients[name] for name, w in weights.items()}, value

    return step


def jitted(function: Callable, names: Sequence[str]) -> Any:
    """Returns a function of arrays with dims of some names, for the mesh."""
    layout = "; ".join(f"{dim}:{axis}" for dim, axis in AXES.items() if dim in names)
    return md.jit(function, MESH, layout, "tf")


def our_arguments(problem: str, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """Returns weights, x and y, on the devices of the mesh."""
    dims = dims_of(problem)
    named = {name: md.named(a, dims[name]) for name, a in arrays(problem, sizes).items()}
    named = jitted(lambda tree: tree, [*sizes])(named)
    return {name: named[name] for name in WEIGHTS[problem]}, named["x"], named["y"]


def ours(problem: str, attention: Callable = written_out) -> Run:
    def transformer(w: Weights, x: md.Tensor) -> md.Tensor:
        return our_transformer(w, x, attention)

    step = jitted(our_step(our_mlp if problem == "mlp" else transformer), [*SIZES[problem]])
    weights, x, y = our_arguments(problem, SIZES[problem])

    def run(count: int) -> Sequence[float]:
        nonlocal weights
        losses = []
        for _ in range(count):
            weights, loss = step(weights, x, y)
            losses.append(loss)
        return [float(loss) for loss in losses]

    return run


def products(problem: str) -> Run:
    """Returns the matrix products of a step alone, without anything before, between or after."""
    step = jitted(our_step(our_mlp if problem == "mlp" else our_transformer), [*SIZES[problem]])
    program = step.lower(*our_arguments(problem, SIZES[problem]))
    factors = [
        sizes for one, _ in program.block.walk() if one.op == "einsum" for sizes in _factors(one)
    ]
    pairs = [[tf.random.normal(shape) for shape in both] for both in factors * program.mesh.size]

    @tf.function(autograph=False)
    def run_once(pairs: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        return [tf.matmul(left, right)[0, 0, 0] for left, right in pairs]

    def run(count: int) -> Sequence[float]:
        for _ in range(count):
            for number in run_once(pairs):
                number.numpy()
        return []

    return run


def _factors(one: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the shapes, on a device, of the two factors of a product as a matrix product."""
    if len(one.inputs) != 2:
        return
    left, right, out = (value.local for value in (*one.inputs, *one.outputs))

    def extent(names: set[str]) -> int:
        sizes = {dim.name: dim.size for dim in (*left, *right)}
        return math.prod(sizes[name] for name in names)

    a, b, kept = (set(shape.names) for shape in (left, right, out))
    both, over = extent(a & b & kept), extent((a & b) - kept)
    yield [both, extent(a - b), over], [both, over, extent(b - a)]


# DTensor's.


def tf_mlp(w: Weights, x: tf.Tensor) -> tf.Tensor:
    h = tf.nn.relu(tf.matmul(x, w["w_in"]) + w["b_in"])
    return tf.matmul(h, w["w_out"]) + w["b_out"]


def tf_norm(x: tf.Tensor) -> tf.Tensor:
    return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6)


def tf_transformer(w: Weights, x: tf.Tensor) -> tf.Tensor:
    h = tf_norm(x)
    q, k, v = (tf.einsum("bsd,dhk->bhsk", h, w[name]) for name in ("query", "key", "value"))
    probabilities = tf.nn.softmax(tf.einsum("bhsk,bhmk->bhsm", q, k) * q.shape[-1] ** -0.5)
    mixed = tf.einsum("bhsm,bhmk->bhsk", probabilities, v)
    x = x + tf.einsum("bhsk,hkd->bsd", mixed, w["out"])
    h = tf.nn.relu(tf.einsum("bsd,df->bsf", tf_norm(x), w["w_in"]))
    return x + tf.einsum("bsf,fd->bsd", h, w["w_out"])


def dtensor(problem: str) -> Run:
    from tensorflow.experimental import dtensor as dt

    mesh = dt.create_mesh(list(md.Mesh.parse(MESH).sizes.items()), devices=logical_devices())
    dims = dims_of(problem)
    placed = {}
    for name, array in arrays(problem, SIZES[problem]).items():
        whole = dt.copy_to_mesh(tf.constant(array), dt.Layout.replicated(mesh, array.ndim))
        split = [AXES.get(dim, dt.UNSHARDED) for dim in dims[name]]
        placed[name] = dt.relayout(whole, dt.Layout(split, mesh))
    weights = {name: dt.DVariable(placed[name]) for name in WEIGHTS[problem]}
    model = tf_mlp if problem == "mlp" else tf_transformer

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(weights, x) - y))
        gradients = tape.gradient(loss, weights)
        for name, weight in weights.items():
            weight.assign_sub(RATE * gradients[name])
        return loss

    def run(count: int) -> Sequence[float]:
        losses = [step(placed["x"], placed["y"]) for _ in range(count)]
        for weight in weights.values():  # calls return before their results are there
            dt.unpack(weight.read_value())[0].numpy()
        return [float(loss) for loss in losses]

    return run


def logical_devices() -> list[str]:
    """Returns the names of as many logical CPUs as the mesh has, which it makes."""
    (host, *_) = tf.config.list_physical_devices("CPU")
    count = md.Mesh.parse(MESH).size
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(host, [one] * count)
    return [f"CPU:{number}" for number in range(count)]


# Mesh-TensorFlow's.


def imported(path: str) -> Any:
    """Imports Mesh-TensorFlow, after lending it what later TensorFlows have lost or moved."""
    from tensorflow.python.framework import ops, tensor_conversion_registry

    one = tf.compat.v1
    one.disable_v2_behavior()
    one.logging.set_verbosity(one.logging.ERROR)
    estimator: Any = types.ModuleType("tensorflow.compat.v1.estimator")
    estimator.CheckpointSaverListener = object
    estimator.SessionRunHook = one.train.SessionRunHook
    one.estimator = sys.modules[estimator.__name__] = estimator
    register = tensor_conversion_registry.register_tensor_conversion_function
    ops.register_tensor_conversion_function = register
    sys.path.append(path)
    return importlib.import_module("mesh_tensorflow")


def mesh_mlp(mtf: Any, w: Weights, x: Any, sized: Callable) -> Any:
    h = mtf.relu(mtf.einsum([x, w["w_in"]], sized("batch hidden")) + w["b_in"])
    return mtf.einsum([h, w["w_out"]], sized("batch d_out")) + w["b_out"]


def mesh_transformer(mtf: Any, w: Weights, x: Any, sized: Callable) -> Any:
    (embed,) = sized("d_model").dims
    (memory,) = sized("memory_length").dims

    def norm(x: Any) -> Any:
        return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=embed) + 1e-6)

    h = norm(x)
    far = mtf.rename_dimension(h, "length", "memory_length")
    q = mtf.einsum([h, w["query"]], sized("batch heads length d_kv"))
    k = mtf.einsum([far, w["key"]], sized("batch heads memory_length d_kv"))
    v = mtf.einsum([far, w["value"]], sized("batch heads memory_length d_kv"))
    scores = mtf.einsum([q, k], sized("batch heads length memory_length"))
    scores *= sized("d_kv").size ** -0.5
    mixed = mtf.einsum([mtf.softmax(scores, memory), v], q.shape)
    x += mtf.einsum([mixed, w["out"]], x.shape)
    h = mtf.relu(mtf.einsum([norm(x), w["w_in"]], sized("batch length hidden")))
    return x + mtf.einsum([h, w["w_out"]], x.shape)


def mesh_tensorflow(problem: str, path: str) -> Run:
    """Data are variables, as weights are: they lie where they are used."""
    mtf, one = imported(path), tf.compat.v1
    count = md.Mesh.parse(MESH).size
    implementation = mtf.placement_mesh_impl.PlacementMeshImpl(
        MESH, ",".join(map(":".join, AXES.items())), [f"/cpu:{number}" for number in range(count)]
    )
    graph = mtf.Graph()
    mesh, sizes = mtf.Mesh(graph, "mesh"), dict(SIZES[problem])
    sizes["memory_length"] = sizes.get("length", 1)
    dims = dims_of(problem)

    def sized(names: str) -> Any:
        return mtf.Shape([mtf.Dimension(name, sizes[name]) for name in names.split()])

    variables = {
        name: mtf.get_variable(
            mesh, name, sized(" ".join(dims[name])), initializer=one.constant_initializer(array)
        )
        for name, array in arrays(problem, SIZES[problem]).items()
    }
    weights = {name: variables[name] for name in WEIGHTS[problem]}
    model = mesh_mlp if problem == "mlp" else mesh_transformer
    out = model(mtf, weights, variables["x"], sized)
    loss = mtf.reduce_mean(mtf.square(out - variables["y"]))
    gradients = mtf.gradients([loss], [*weights.values()])
    updates = [
        mtf.assign_sub(w, RATE * g) for w, g in zip(weights.values(), gradients, strict=True)
    ]
    lowering = mtf.Lowering(graph, {mesh: implementation})
    step = [
        lowering.export_to_tf_tensor(loss),
        one.group([lowering.lowered_operation(update) for update in updates]),
    ]
    session = one.Session(config=one.ConfigProto(device_count={"CPU": count}))
    session.run(one.global_variables_initializer())
    session.run(lowering.copy_masters_to_slices())
    return lambda count: [float(session.run(step)[0]) for _ in range(count)]


# Turns.


def contestant(name: str, problem: str, path: str) -> Run:
    """Returns one of `contestants`."""
    if name == "mesh_tensorflow":
        return mesh_tensorflow(problem, path)
    if name == "dtensor":
        return dtensor(problem)
    if name == PRODUCTS:
        return products(problem)
    return ours(problem, in_one if name == "ours, md.attention" else written_out)


def contestants(problem: str, path: str) -> list[str]:
    """Returns who takes part; ours is the first, to which the others are compared."""
    found = ["ours", "dtensor", PRODUCTS]
    if (Path(path or os.devnull) / "mesh_tensorflow").is_dir():
        found.append("mesh_tensorflow")
    return [*found, "ours, md.attention"] if problem == "transformer" else found


def serve(run: Run) -> None:
    """Runs as many steps as each line of the input says, and prints how long one took."""
    for line in sys.stdin:
        count = int(line)
        start, started = time.perf_counter(), time.process_time()
        losses = run(count)
        seconds = (time.perf_counter() - start) / count
        processor = (time.process_time() - started) / count
        answer = {"seconds": seconds, "processor": processor, "losses": losses}
        print(json.dumps(answer), flush=True)


class Child:
    """A contestant in a process of its own, which waits while it is not its turn."""

    def __init__(self, name: str, problem: str, path: str) -> None:
        self.name = name
        command = [sys.executable, "-m", "tests.benchmarks.tf_time", f"--child={name}"]
        command += [f"--problem={problem}", f"--mesh_tensorflow={path}"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.losses = self._ask(FIRST)["losses"]

    def _ask(self, count: int) -> Any:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        print(count, file=asked, flush=True)
        line = answers.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended, with {self._process.wait()}")
        return json.loads(line)

    def seconds(self, count: int) -> float:
        """Runs some steps, and returns how long one took."""
        return self._ask(count)["seconds"]

    def end(self) -> None:
        self._process.communicate()


def check_losses(children: Sequence[Child]) -> None:
    """Asserts that all learn the same: the falls of the losses are far below the losses."""
    expected = children[0].losses
    for child in children[1:]:
        if child.name == PRODUCTS:
            continue
        np.testing.assert_allclose(child.losses, expected, rtol=1e-4, err_msg=child.name)
        falls = (expected[0] - expected[-1], child.losses[0] - child.losses[-1])
        np.testing.assert_allclose(*falls, rtol=0.02, err_msg=child.name)


def compare(problem: str, path: str, rounds: int, steps: int) -> None:
    """Prints what a step of each takes."""
    children = [Child(name, problem, path) for name in contestants(problem, path)]
    check_losses(children)
    taken: dict[str, list[float]] = {child.name: [] for child in children}
    for number in range(rounds):
        for child in children if number % 2 else reversed(children):
            taken[child.name].append(child.seconds(steps))
    for child in children:
        child.end()
        ratios = np.divide(taken[child.name], taken["ours"])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        median, losses = statistics.median(taken[child.name]), child.losses
        print(
            f"{problem:12s} {child.name:19s} {1e3 * median:8.1f} ms   {middle:.3f} x ours "
            f"(quartiles {low:.3f} to {high:.3f})   {_told(losses)}",
            flush=True,
        )


def _told(losses: Sequence[float]) -> str:
    return f"loss {losses[0]:.6f}, {losses[1]:.6f} ... {losses[-1]:.6f}" if losses else ""


# What waits before the first step, and around each.


def stacked(depth: int) -> tuple[Callable, tuple[Any, ...], list[str]]:
    """Returns a step of several small layers, its arguments, and the dims of these."""
    sizes = SIZES["transformer"] | {"batch": 4, "length": 8, "d_model": 16, "d_kv": 4, "hidden": 16}
    dims = dims_of("transformer")
    found = {name: md.named(a, dims[name]) for name, a in arrays("transformer", sizes).items()}
    x, y = found.pop("x"), found.pop("y")
    layers = md.Dimension("layers", depth)
    weights = {
        name: md.named(np.stack([np.asarray(w)] * depth), [layers, *w.dims])
        for name, w in found.items()
    }

    def model(weights: Weights, x: md.Tensor) -> md.Tensor:
        def layer(x: md.Tensor, w: Weights) -> tuple[md.Tensor, None]:
            return our_transformer(w, x), None

        return md.scan(layer, x, weights, dim="layers")[0]

    return our_step(model), (weights, x, y), [*sizes]


def nodes(compiled: Any) -> int:
    """Returns how many nodes the graph of one device has, with the functions that it calls."""
    graph = compiled.executable.replica.graph.as_graph_def()
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


def timed(function: Callable, *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def before_the_first_step(name: str, step: Callable, arguments: Any, dims: Sequence[str]) -> None:
    """Prints what tracing, building and the first call take."""
    lowering, program = timed(jitted(step, dims).lower, *arguments)
    building, compiled = timed(program.compile)
    first, _ = timed(compiled, *arguments)
    print(
        f"{name:30s} graph of a device {nodes(compiled):5d} nodes   trace and lower "
        f"{lowering:.3f} s   build {building:.3f} s   first call {first:.3f} s",
        flush=True,
    )


def host_time(repeats: int) -> None:
    """Prints what a call costs beyond that of its tf.function with tensors that are ready."""
    sizes = {"batch": 8, "d_in": 8, "hidden": 8, "d_out": 8}
    arguments = our_arguments("mlp", sizes)
    compiled = jitted(our_step(our_mlp), [*sizes]).lower(*arguments).compile()
    leaves, _ = compiled.jitted.flatten(arguments)
    executable = compiled.executable
    rows = [stored.put(a, executable.devices) for a, stored in zip(leaves, executable.inputs)]  # noqa: B905
    ready = [tensor for row in zip(*rows, strict=True) for tensor in row]
    ways = {
        "call": lambda: compiled(*arguments),
        "run": lambda: compiled.run(leaves),
        "call_flat": lambda: executable.call_flat(leaves),
    }
    beyond: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats):
        base, _ = timed(executable._step, *ready)
        for name, way in ways.items():
            took, _ = timed(way)
            if number >= FIRST:
                beyond[name].append(took - base)
    told = ", ".join(f"{name} {1e3 * statistics.median(t):.3f} ms" for name, t in beyond.items())
    print(f"host time beyond TensorFlow's own, of a small step: {told}")


def alone() -> None:
    """Prints what concerns ours alone."""
    for problem, model in {"mlp": our_mlp, "transformer": our_transformer}.items():
        arguments = our_arguments(problem, SIZES[problem])
        before_the_first_step(problem, our_step(model), arguments, [*SIZES[problem]])
    for depth in (2, 12):
        step, arguments, dims = stacked(depth)
        before_the_first_step(f"{depth} small transformer layers", step, arguments, dims)
    host_time(repeats=200)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--problem", action="append", choices=[*SIZES], help="leave out for both")
    parser.add_argument("--mesh_tensorflow", default="", help="the folder it is installed in")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="of each, in a round")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    problems, path = arguments.problem or [*SIZES], arguments.mesh_tensorflow
    if arguments.child:
        serve(contestant(arguments.child, problems[0], path))
        return
    for problem in problems:
        if "mesh_tensorflow" not in contestants(problem, path):
            print("Mesh-TensorFlow is left out: --mesh_tensorflow names no folder that has it")
        compare(problem, path, arguments.rounds, arguments.steps)
    alone()


if __name__ == "__main__":
    main()
