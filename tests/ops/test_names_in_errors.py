"""An error names the operation that the user called, not one of which it is made.

Each public operation is called as in its docstring's example, and then with one argument wrong at a
time: another dtype, another type, other dims, misspelt names.
"""

import contextlib
import doctest
import inspect
import io
import traceback
from collections.abc import Sequence

import jax
import numpy as np
import pytest

import meshdsl as md
from docs.making import reference
from meshdsl.ops.operation import operation
from meshdsl.tracing.trace import Trace, tracing

EXAMPLE = "<example>"
PAGES = ("elementwise", "dims", "reductions", "products", "control", "gradients", "random")
PAGES += ("linalg", "fft", "nn")
PARSER = doctest.DocTestParser()
# The function that it is given is the operation that the user called.
HIGHER = {"md.outer"}


class Recorder:
    """A module whose functions note how they are called, before they run."""

    def __init__(self, module, calls):
        self.module, self.calls = module, calls

    def __getattr__(self, name):
        value = getattr(self.module, name)
        if inspect.ismodule(value):
            return Recorder(value, self.calls)
        if not inspect.isfunction(value):
            return value

        def call(*args, **kwargs):
            self.calls.append((value, args, kwargs))
            return value(*args, **kwargs)

        return call


def call_of(function):
    """Returns the arguments of the first call of a function in its example; None: it has none."""
    calls = []
    names = {"md": Recorder(md, calls), "np": np}
    text = inspect.cleandoc(function.__doc__ or "")
    with tracing(Trace()), contextlib.redirect_stdout(io.StringIO()):
        for example in PARSER.get_doctest(text, {}, "", "", 0).examples:
            with contextlib.suppress(Exception):  # what needs values: it is not run, only traced
                exec(compile(example.source, EXAMPLE, "single"), names)
    found = [(args, kwargs) for value, args, kwargs in calls if value is function]
    return found[0] if found else None


def is_tensor(value):
    return isinstance(value, md.Tensor)


def filled(dims, dtype):
    return md.named(np.ones([dim.size for dim in dims], dtype), dims)


def mistaken(value):
    """Yields values for an argument's place, of which most are mistakes."""
    if is_tensor(value):
        dims, dtype = value.dims, value.dtype
        for other in ("bool", "complex64", "int32", "float32"):
            if other != dtype.name:
                yield filled(dims, other)
        yield from (np.ones(dims.sizes, dtype), "text", None, [1, 2], 3.5, filled([], dtype))
        yield filled([md.Dimension(f"dim_{n}", dim.size) for n, dim in enumerate(dims)], dtype)
        yield filled([md.Dimension(dim.name, dim.size + 1) for dim in dims], dtype)
    elif isinstance(value, md.Dimension):
        yield md.Dimension(f"{value.name}z", value.size)
        yield md.Dimension(value.name, value.size + 1)
        yield 7
    elif isinstance(value, str):
        yield from (f"{value}z", 7, None)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (-3, "text", 2.5, 10**6)


def calls_with_one_mistake(args, kwargs):
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: is_tensor(x) or x is None)
    leaves = [filled(x.dims, x.dtype) if is_tensor(x) else x for x in leaves]
    for place, leaf in enumerate(leaves):
        for wrong in mistaken(leaf):
            yield wrong, jax.tree.unflatten(tree, [*leaves[:place], wrong, *leaves[place + 1 :]])


def is_of_the_example(error):
    """Whether a function that the example gives to the operation raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename == EXAMPLE for frame in frames)


def mistakes_of(function, call):
    """Returns how many calls failed, and the errors that do not name the function."""
    failed, wrong = 0, []
    for value, (args, kwargs) in calls_with_one_mistake(*call):
        try:
            with tracing(Trace()):
                function(*args, **kwargs)
        except Exception as error:
            if is_of_the_example(error):
                continue
            failed += 1
            lines = str(error).split("\n")
            named = isinstance(error, ValueError) and lines[0].startswith(f"{function.__name__}: ")
            located = function is md.primitive or "test_names_in_errors.py" in lines[-1]
            if not named or not located:
                wrong.append(f"{value!r}: {type(error).__name__}: {error}")
    return failed, wrong


FUNCTIONS = {
    written: value
    for page in PAGES
    for written, value in reference.names_of(page)
    if inspect.isfunction(value) and written not in HIGHER
}


@pytest.mark.parametrize("page", PAGES)
def test_an_error_begins_with_the_name_of_the_called_operation(page):
    every = [w for w, _ in reference.names_of(page) if w in FUNCTIONS]
    calls = {w: call_of(FUNCTIONS[w]) for w in every}
    tried, wrong = 0, []
    for written, call in calls.items():
        if call is None or not any(map(is_tensor, jax.tree.leaves(call, is_leaf=is_tensor))):
            continue
        failed, bad = mistakes_of(FUNCTIONS[written], call)
        tried += failed
        wrong += [f"{written} with {text}" for text in bad]
    assert not wrong, "\n".join(wrong)
    assert tried > 10 * len(every) / 2  # the examples are read, and their mistakes noticed


def test_the_part_that_noticed_is_told_too():
    with pytest.raises(ValueError) as error:
        md.reciprocal(md.named(np.ones(3, "i4"), ["embed"]))
    first, *rest = str(error.value).split("\n")
    assert first == "reciprocal: needs floating-point or complex tensors, got s32"
    assert rest[:2] == ["  operand 1: s32[embed=3]", "  where it calls divide"]
    assert rest[2].startswith("  at ") and "md.reciprocal(" in rest[2]
    assert len(rest) == 3


def test_a_function_of_the_users_keeps_its_errors():
    x = md.named(np.ones(3, "f4"), ["embed"])

    def mine(x):
        return md.sum(x, "embd")

    with pytest.raises(ValueError, match=r"^sum: no dim `embd`") as error:
        md.nn.mlp(x, md.ones(md.dims(embed=3, d_ff=2)), x, activation=mine)
    assert str(error.value).endswith('return md.sum(x, "embd")')


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: md.pad(x, "embed", low="1"), "pad: `low` takes a whole number, not str"),
        (lambda x: md.top_k(x, 2, "embed", into=3), "top_k: `into` takes a dim, not int"),
        (lambda x: md.tile(x, "embed", 2.5), "tile: `times` takes a whole number, not float"),
        (
            lambda x: md.nn.rms_norm(x.data, "embed"),
            "rms_norm: `x` takes tensors, not ndarray; name",
        ),
        (
            lambda x: md.nn.layer_norm(x, "embed", x.data),
            "layer_norm: `scale` takes tensors or None, not ndarray; name the dims of an array",
        ),
        (
            lambda x: md.split_into(x, "embed", "12"),
            "split_into: `sizes` takes a whole number or a list of whole numbers, not str",
        ),
    ],
)
def test_arguments_of_other_types_are_named(call, text):
    with pytest.raises(ValueError) as error:
        call(md.named(np.ones(3, "f4"), ["embed"]))
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    "eps", [md.named(np.float32(1e-6), []), np.float32(1e-6), np.float64(1e-6), 1]
)
def test_an_argument_that_fits_is_not_blamed_for_another(eps):
    x, wrong = md.ones(md.dims(batch=2, embed=3)), md.ones(md.dims(wrong=5))
    for layer in (md.nn.rms_norm, md.nn.layer_norm):

        def call(x, layer=layer):
            return layer(x, "embed", wrong, eps=eps)

        for run in (call, md.jit(call)):
            with pytest.raises(ValueError, match=r"one operand must have the dims of all") as error:
                run(x)
            assert "eps" not in str(error.value).split("\n")[0]


@operation
def of_kinds(
    x: md.Tensor,
    whole: int = 1,
    real: float = 1.0,
    flag: bool = True,
    sizes: Sequence[int] = (1,),
) -> md.Tensor:
    return md.sum(x, "none_of_these")


@pytest.mark.parametrize(
    "given",
    [
        {"whole": np.int8(1)},
        {"whole": md.named(np.int32(1), [])},
        {"real": md.named(np.float32(1), [])},
        {"flag": np.bool_(True)},
        {"flag": md.named(np.bool_(True), [])},
        {"sizes": np.array([1, 2])},
    ],
)
def test_scalars_with_a_dtype_fit(given):
    x = md.ones(md.dims(embed=3))
    with pytest.raises(ValueError, match=r"^sum: no dim `none_of_these`"):
        of_kinds(x, **given)


def test_only_what_has_no_dims_is_told_to_name_them():
    x = md.ones(md.dims(embed=3))
    for given, text in (
        ({"real": x}, "`real` takes a number, not NamedArray"),
        ({"whole": np.ones(3)}, "`whole` takes a whole number, not ndarray"),
        ({"flag": np.str_("yes")}, "`flag` takes True or False, not str_"),
    ):
        with pytest.raises(ValueError) as error:
            of_kinds(x, **given)
        assert str(error.value).split("\n")[0] == f"of_kinds: {text}"
