"""The house rules of ARCHITECTURE.md: who imports whom, small files, and one rule per primitive."""

import ast
import collections
import importlib
import inspect
import itertools
import pkgutil
from pathlib import Path

import pytest

import meshdsl as md
import meshdsl.ops
from meshdsl import late
from meshdsl.lowering import partition
from meshdsl.lowering.backends import jax as jax_backend
from meshdsl.lowering.backends import numpy as numpy_backend
from meshdsl.lowering.backends import tf as tf_backend
from meshdsl.lowering.pipelining import regions
from meshdsl.lowering.program import COLLECTIVES
from meshdsl.tracing.graph import Primitive

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("meshdsl", "layouts", "lowering", "models")
FILES = sorted(f for room in ROOMS for f in (ROOT / room).rglob("*.py"))
ALL_FILES = FILES + sorted(f for room in ("tests", "examples") for f in (ROOT / room).rglob("*.py"))


def name_of(file):
    return str(file.relative_to(ROOT))


def imports(file):
    """Returns the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}: relative imports hide the room"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


# Files (without the exceptions) that import nothing below any of the listed modules.
RULES = {
    "the language knows nothing of devices": (
        "meshdsl/",
        (
            "meshdsl/language.py",
            "meshdsl/cli/",
            "meshdsl/generation/",
            "meshdsl/reports/",
            "meshdsl/search/",
            "meshdsl/running/jit.py",
            "meshdsl/running/placing.py",
            "meshdsl/running/runnable.py",
        ),
        ("meshdsl.lowering", "meshdsl.models", "tensorflow"),
    ),
    "operations know nothing of layouts": ("meshdsl/ops/", (), ("meshdsl.layouts",)),
    "tensors know nothing of what is made of them": (
        "meshdsl/tensors/",
        ("meshdsl/tensors/numpy_calls.py", "meshdsl/tensors/policy.py"),
        ("meshdsl.ops", "meshdsl.gradients", "meshdsl.running", "meshdsl.tracing.trace"),
    ),
    "nothing below reads reports": (
        "lowering/",
        (),
        ("meshdsl.reports", "meshdsl.running", "meshdsl.search"),
    ),
    "a search prints nothing": ("meshdsl/search/", (), ("meshdsl.reports", "meshdsl.cli")),
    "training knows nothing of commands": ("meshdsl/training/", (), ("meshdsl.cli",)),
    "layouts know nothing of lowering": (
        "layouts/",
        ("layouts/mesh.py",),  # which takes JAX's meshes
        ("meshdsl.lowering", "meshdsl.models", "meshdsl.ops", "jax", "tensorflow"),
    ),
    "lowering knows nothing of backends": (
        "lowering/",
        ("lowering/backends/",),
        ("meshdsl.lowering.backends", "meshdsl.models", "meshdsl.cli", "tensorflow"),
    ),
    "schedules of pipelines are data": (
        "lowering/pipelines/",
        (),
        (
            *(f"meshdsl.{room}" for room in ("tensors", "tracing", "ops", "gradients", "layouts")),
            *(f"meshdsl.lowering.{room}" for room in ("graphs", "placement", "writing", "passes")),
            *(f"meshdsl.lowering.{file}" for file in ("program", "instructions", "stages")),
            *("meshdsl.lowering.costs", "meshdsl.lowering.partition", "jax", "numpy"),
        ),
    ),
    "partition rules know nothing of frameworks": ("lowering/partition/", (), ("jax",)),
    "backends know programs only": (
        "lowering/backends/",
        (),
        (
            "meshdsl.lowering.partition",
            "meshdsl.lowering.lower",
            "meshdsl.ops",
            "meshdsl.tracing.graph",
        ),
    ),
    "the reference backend does not use what it checks": (
        "lowering/backends/numpy/",
        (),
        ("jax", "tensorflow"),
    ),
    "what backends share knows no framework": (
        "lowering/backends/common/",
        (),
        ("jax", "tensorflow", "scipy"),
    ),
    "models never mention devices": (
        "models/",
        (),
        ("meshdsl.lowering", "meshdsl.layouts", "jax.sharding"),
    ),
    "TensorFlow is imported only where its backend is used": (
        "lowering/backends/",
        ("lowering/backends/tf/", "lowering/backends/contract.py"),  # for mypy alone
        ("tensorflow", "meshdsl.lowering.backends.tf"),
    ),
    "only public names of tensorflow": (
        "",
        ("tests/benchmarks/tf_time.py",),  # which mends an old package's imports
        ("tensorflow.python", "tensorflow.core", "tensorflow.compiler", "keras.src"),
    ),
    "only public names of jax": ("", (), ("jax._src", "jax.interpreters", "jaxlib")),
}


@pytest.mark.parametrize("rule", RULES)
def test_imports_point_one_way(rule):
    folder, exceptions, forbidden = RULES[rule]
    guilty = [
        f"{name_of(file)} imports {module}"
        for file in ALL_FILES
        if name_of(file).startswith(folder) and not name_of(file).startswith(exceptions or ("-",))
        for module in sorted(imports(file))
        if any(module == f or module.startswith(f + ".") for f in forbidden)
    ]
    assert not guilty, guilty


def module_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "meshdsl" else ("meshdsl", *parts)
    return ".".join(parts).removesuffix(".__init__")


def edges():
    """Returns which modules each one imports, anywhere but for type checkers alone.

    The public language is left out: it gathers names for users, and layers are written with it.
    """
    modules = {module_of(file): file for file in FILES}
    del modules["meshdsl"], modules["meshdsl.language"]
    found = {}
    for module, file in modules.items():
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names.update(full & set(modules) or {node.module})
        found[module] = names & set(modules) - {module}
    return found


def knots():
    """Returns the sets of modules that import each other, by way of others or directly."""
    graph = edges()

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for module in graph[todo.pop()] - seen:
                seen.add(module)
                todo.append(module)
        return seen

    reach = {module: reached(module) for module in graph}
    alike = {m: frozenset(o for o in reach[m] if m in reach[o]) for m in graph}
    return {knot for module, knot in alike.items() if module in knot}


def test_modules_that_import_each_other_are_pairs_that_say_why():
    """The exceptions to one way: pairs of modules, whose later import has a comment."""
    assert {tuple(sorted(knot)) for knot in knots()} == {
        (
            "meshdsl.lowering.backends.jax.operations.attention_fused",
            "meshdsl.lowering.backends.jax.operations.attention_splash",
        ),
        ("meshdsl.ops.elementwise.arithmetic", "meshdsl.ops.elementwise.complex_numbers"),
        ("meshdsl.ops.products.factorizations", "meshdsl.ops.products.linalg"),
        ("meshdsl.tensors.named_array", "meshdsl.tensors.numpy_calls"),
    }


def test_calls_up_the_house_are_listed_and_made():
    """`meshdsl.late` has what they call, and a name in it that nobody calls is gone."""
    text = "".join(file.read_text() for file in FILES)
    for name in late.CALLS:
        assert late.late(name)
        assert f'late("{name}")' in text.replace("late(f", "")


def test_no_room_has_more_files_than_one_can_oversee():
    count = collections.Counter(file.parent for file in FILES)
    full = {name_of(room): n for room, n in count.items() if n > 22}
    assert not full


def test_no_file_is_longer_than_600_lines():
    long = {name_of(f): n for f in ALL_FILES if (n := len(f.read_text().splitlines())) > 600}
    assert not long


def test_every_module_says_what_it_is_for():
    assert [name_of(f) for f in ALL_FILES if not ast.get_docstring(ast.parse(f.read_text()))] == []


# Operations, partition rules and backends.


def families():
    """Returns the modules of `meshdsl.ops`."""
    found = pkgutil.walk_packages(meshdsl.ops.__path__, "meshdsl.ops.")
    return [importlib.import_module(module.name) for module in found]


def primitives():
    """Returns every primitive of the language by name."""
    values = [value for module in families() for value in vars(module).values()]
    values += itertools.chain(*(v.values() for v in values if isinstance(v, dict)))
    return {value.name: value for value in values if isinstance(value, Primitive)}


# Operations that lowering writes into graphs, and that users never trace: they have no gradients.
LOWERING_ALONE = {p.name: p for p in vars(regions).values() if isinstance(p, Primitive)}


def test_every_primitive_has_a_partition_rule():
    """Apart from operations with bodies, which are lowered or inlined, and marks, which vanish."""
    apart = {name for name, p in primitives().items() if p.result_graphs or p.mark}
    assert set(primitives()) - apart == set(partition.RULES) - set(LOWERING_ALONE)


def test_every_primitive_has_a_gradient_rule():
    """It stands beside its shape rule in meshdsl/ops; those that have none are listed here."""
    ways = ("gradient", "replay")
    bare = {n: p for n, p in primitives().items() if not any(getattr(p, way) for way in ways)}
    without = {n: p.rule.__module__.replace(".", "/") for n, p in bare.items() if not p.flat}
    listed = {"full", "arange", "literal", "random_bits", "fold_in", "print"}
    missing = [f"`{n}`: gradient=... in {without[n]}.py" for n in sorted(without.keys() - listed)]
    assert missing == []
    assert listed <= without.keys()


def test_partition_rules_mirror_the_families_of_operations():
    operations = {f.stem for f in (ROOT / "meshdsl" / "ops").rglob("*.py")}
    operations |= {f.name for f in (ROOT / "meshdsl" / "ops").iterdir()}
    rules = {f.stem for f in (ROOT / "lowering" / "partition").glob("*.py")}
    rules |= {f.stem for f in (ROOT / "lowering" / "partition" / "products").glob("*.py")}
    # What several families share, and the operations of LOWERING_ALONE.
    assert rules - operations == {"splits", "strategy", "regions"}


def test_the_backends_have_the_same_instructions():
    assert set(numpy_backend.EMITTERS) == set(jax_backend.EMITTERS) == set(tf_backend.EMITTERS)
    assert set(COLLECTIVES) < set(jax_backend.EMITTERS)
    assert len(jax_backend.EMITTERS) < 200  # the instruction set is small on purpose


def test_whatever_a_rule_writes_every_backend_knows():
    written = set()
    for file in (ROOT / "lowering").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("one", "add")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                written.add(node.args[0].value)
    assert {"full", "einsum", "take", "cond", "scan", "while"} <= written
    own_names = set(partition.RULES) & set(numpy_backend.EMITTERS)
    assert written <= set(numpy_backend.EMITTERS)
    renamed = {
        "arange": "iota",
        "random_bits": "threefry2x32",
        "fold_in": "threefry2x32",
        "merge": "reshape",
    }
    renamed |= {"split": "reshape", "stop_gradient": "rename"}
    renamed |= {"index": "window", "split_into": "window", "stack": "concat"}
    renamed |= {"enter_stages": "reshape", "leave_stages": "reshape", "vary_over_stages": "rename"}
    renamed |= {"deal_to_stages": "permute", "collect_from_stages": "permute"}
    assert set(partition.RULES) - own_names == set(renamed)


def test_every_operation_shows_how_it_is_called():
    bare = {
        f"{module.__name__}.{name}"
        for module in (md, md.linalg, md.fft)
        for name in getattr(module, "__all__", dir(module))
        if inspect.isfunction(function := getattr(module, name))
        and f"md.{name}" not in (doc := inspect.getdoc(function) or "")
        and f"{name}(" not in doc
    }
    assert bare == {"meshdsl.mod"}  # another name of remainder
