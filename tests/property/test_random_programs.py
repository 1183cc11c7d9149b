"""Random programs on random meshes and layouts: one answer, wherever and with whatever they run.

`python -m pytest tests/property --cases=5000 --first_case=0 --jax_every=10 -n 2` runs the cases 0
to 4999. Without the options, a sample that the commit chooses is run.

Every case is run by the numpy backend on one device and on its mesh, lowered in each way that it
draws, with NaN in all pads, and its gradient is compared with finite differences and with its
derivative in forward mode. Compilation takes
most of the time, so only some cases run on the other backends: every fourth, or `--jax_every`, on
JAX, others on TensorFlow (`--tf_every`), on host devices and as the program of a TPU, which XLA:CPU
runs in this process. A case that fails is shrunk, and shown as Python to paste.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.passes.verify import verify
from meshdsl.tensors.cuts import pad
from tests.property import minimal
from tests.property.pads import poisoned
from tests.property.programs import Case, make_case, make_pipeline
from tests.reference import tf_tpu

pytestmark = pytest.mark.optimized  # it is about rounding

TOLERANCE = 1e-9
OFFSETS = {"jax": 0, "tf": 1, "tpu": 2}  # so that a case runs on few backends


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_layout_and_backend_gives_the_same_numbers(case_number, request):
    check_or_tell(make_case(case_number), request.config)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_pipeline_gives_the_same_numbers(pipeline_number, request):
    check_or_tell(make_pipeline(pipeline_number), request.config)


def check_or_tell(case: Case, config: pytest.Config) -> None:
    """Raises AssertionError, with the failure shrunk, unless a case is as on one device."""
    every = {name: config.getoption(f"{name}_every") for name in ("jax", "tf", "tpu")}
    chosen = [name for name, n in every.items() if n and case.number % n == OFFSETS[name] % n]
    try:
        check(case, ("numpy", *chosen))
    except Exception as error:
        error.add_note(told(case, ("numpy", *chosen)))
        raise
    if case.number % 100 == 99:
        jax.clear_caches()  # a long run would hold every compiled program


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", [85, 479])
def test_what_compilers_rounded_twice(number):
    """Cases whose extremes XLA computed again, rounded otherwise, and then did not find."""
    check(make_case(number), ("tpu",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_loop_compared_with_a_maximum_that_was_rounded_otherwise():
    """Windows whose largest element is close to 0, after a multiply-add in the forward pass."""
    check(make_case(1220), ("jax",))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", [1926, 2786, 4786, 5302, 7786, 9368])
def test_what_failed_to_lower_once(number):
    """Cases that failed in the writing of shared tensors, of a group sum (7786), of a second
    derivative of attention (2786, 9368) and of an input that has a layout by its path alone (4786).
    """
    check(make_case(number), ("numpy",))


def told(case: Case, backends: Sequence[str]) -> str:
    """Returns a minimal program that still fails, as Python to paste; else the whole case."""
    for backend, options in itertools.product(backends, case.options):
        if backend == "tpu":  # which `md.jit` knows nothing of
            continue
        found = minimal.failure(case, backend, options)
        if found.holds():
            smallest = minimal.as_python(minimal.minimise(found))
            return f"case {case.number}, shrunk:\n\n{smallest}\n"
    return str(case)


def check(case: Case, backends: Sequence[str] = ("numpy", "jax")) -> None:
    single = md.jit(case.function, backend="numpy")
    expected = single(case.inputs)
    for backend in backends:
        for options in case.options if backend == "numpy" else case.options[:1]:
            jit = tf_tpu.jit if backend == "tpu" else functools.partial(md.jit, backend=backend)
            run = jit(case.function, case.mesh, case.layout, options=options)
            if backend == "numpy":
                program = run.lower(case.inputs)
                verify(program)
                program.compile()  # for the call
            with poisoned():
                found = run(case.inputs)
            compare(found, expected, f"{backend} on {case.mesh}, {options}")
            check_pads(found, case.inputs)
    if case.differentiable:
        check_gradient(case, single, expected)
    if not case.trains:
        check_tangent(case, expected)


def compare(found, expected, what: str) -> None:
    """Every leaf agrees, to the tolerance, relative to the largest magnitude in it."""
    leaves = jax.tree_util.tree_leaves_with_path(expected, is_leaf=_is_array)
    for (path, want), have in zip(leaves, jax.tree.leaves(found, is_leaf=_is_array), strict=True):
        want, have = np.asarray(want), np.asarray(have)
        where = f"{what}: {jax.tree_util.keystr(path)}"
        assert want.dtype == have.dtype and want.shape == have.shape, where
        if want.dtype != np.float64:
            assert np.array_equal(want, have), where
            continue
        assert np.isfinite(want).all(), f"{where} is not finite"
        scale = np.abs(want).max(initial=1.0)
        error = np.abs(want - have).max(initial=0.0)
        assert error <= TOLERANCE * scale, f"{where}: off by {error:.3g} at scale {scale:.3g}"


def check_pads(results, inputs) -> None:
    """All pads of results are zeros, whatever those of the inputs were.

    A result that is an input has pads as they were given.
    """
    same = [np.asarray(one) for one in jax.tree.leaves(inputs, is_leaf=_is_array)]
    for array in jax.tree.leaves(results, is_leaf=_is_array):
        if not _is_array(array) or not array.cuts:
            continue
        logical = np.asarray(array)
        if not any(np.array_equal(logical, one) for one in same):
            assert np.array_equal(np.asarray(array.data), pad(np, logical, array.cuts))


def _is_array(leaf) -> bool:
    return isinstance(leaf, md.NamedArray)


def check_gradient(case: Case, single, expected) -> None:
    """Central differences along a random direction give the slope that the gradient tells.

    A jump may lie between the two points; then other directions tell.
    """
    rng = np.random.default_rng([case.number, 4])
    step = 1e-7
    seen = []
    for _ in range(3):
        ways = {n: rng.uniform(-1, 1, g.data.shape) for n, g in expected["gradients"].items()}
        ends = [
            float(single(_moved(case.inputs, ways, sign * step))["loss"]) for sign in (1.0, -1.0)
        ]
        told = sum(float((ways[n] * g.data).sum()) for n, g in expected["gradients"].items())
        slope = (ends[0] - ends[1]) / (2 * step)
        scale = max(1.0, abs(float(expected["loss"])), abs(told))
        if abs(slope - told) <= 1e-6 * scale:
            return
        seen.append((slope, told))
    raise AssertionError(f"finite differences and gradient: {seen}")


def check_tangent(case: Case, expected) -> None:
    """Forward mode along a random direction gives the slope that the gradient tells."""
    rng = np.random.default_rng([case.number, 5])
    gradients = {name: np.asarray(g) for name, g in expected["gradients"].items()}
    ways = {
        n: md.named(rng.uniform(-1, 1, g.shape), case.inputs[n].dims) for n, g in gradients.items()
    }

    def along(inputs, ways):
        def loss(moving):
            return case.function({**inputs, **moving})["loss"]

        return md.jvp(loss, ({name: inputs[name] for name in ways},), (ways,))[1]

    found = float(md.jit(along, backend="numpy")(case.inputs, ways))
    told = sum(float((ways[name].data * g).sum()) for name, g in gradients.items())
    scale = max(1.0, abs(float(expected["loss"])), abs(told))
    assert abs(found - told) <= 1e-8 * scale, f"forward mode: {found}, gradient: {told}"


def _moved(inputs, ways, step):
    return {
        name: md.NamedArray(a.data + step * ways[name], a.dims) if name in ways else a
        for name, a in inputs.items()
    }
