"""The public names: what `import meshdsl as md` gives, and no more."""

import inspect
import subprocess
import sys
import types

import pytest

import meshdsl as md
from meshdsl import ops
from meshdsl.ops.elementwise import activations, arithmetic, bits, complex_numbers, special
from meshdsl.ops.operation import at_once, operation
from meshdsl.tensors.idioms import missing
from tests.test_house import families, primitives

# Primitives that users reach through the operations that are made of them.
INTERNAL = frozenset(
    "attention_gradient barrier convolve kept literal once_differentiable prod_others quantized "
    "random_bits scatter_add scatter_max scatter_min update window window_match window_max "
    "window_sum".split()
)
MARKED = [mark(lambda: None).__code__ for mark in (operation, at_once)]
FUNCTIONS = [n for n in md.__all__ if isinstance(getattr(md, n), types.FunctionType)]
INTERNAL |= {"grouped_outer"}  # the gradient of `grouped_einsum`


def test_the_public_names_are_listed_and_all_there():
    assert dir(md) == sorted(md.__all__)
    assert len(set(md.__all__)) == len(md.__all__)
    assert not [name for name in md.__all__ if not hasattr(md, name)]


def test_what_the_families_of_operations_list_is_public():
    """A word of theirs that is missing here belongs in `__all__` of meshdsl/language.py."""
    families = (ops, activations, arithmetic, bits, complex_numbers, special)
    listed = {name for family in families for name in family.__all__}
    forgotten = listed - set(md.__all__)
    assert forgotten == set()


def test_every_operation_has_a_public_word():
    words = {p.word or name: p.rule.__module__ for name, p in primitives().items()}
    for module in families():
        functions = filter(inspect.isfunction, vars(module).values())
        marked = [f for f in functions if f.__code__ in MARKED and f.__module__ == module.__name__]
        words |= {f.__name__: module.__name__ for f in marked if not f.__name__.startswith("_")}
    public = set(md.__all__).union(*(room.__all__ for room in (md.fft, md.linalg, md.random)))
    forgotten = set(words) - public - INTERNAL - {"attention_reference"}
    assert not forgotten, "; ".join(
        f"`{word}` of {words[word].replace('.', '/')}.py has no word in `__all__` of "
        "meshdsl/language.py; if that is on purpose, list it in INTERNAL of this test"
        for word in sorted(forgotten)
    )
    assert set(words) >= INTERNAL


@pytest.mark.parametrize("line", ["md.softmx", "md.named([0], 'a').dimz"])
def test_a_wrong_name_gets_one_hint(line):
    """Python adds a hint of its own to an AttributeError, unless that says that it has no name."""
    program = f"import meshdsl as md; {line}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stderr.rstrip().count("Did you mean") == 1, result.stderr


def test_a_listed_name_that_no_file_gives_is_answered_with_the_files_to_add_it_to():
    text = str(missing("sinc", ["sin", "sinc"]))
    assert "no attribute 'sinc', though its __all__ lists it" in text
    assert "meshdsl/ops/elementwise" in text and "meshdsl/ops/__init__.py" in text


def test_the_only_public_modules_are_families_of_functions():
    modules = [name for name in md.__all__ if isinstance(getattr(md, name), types.ModuleType)]
    assert modules == ["fft", "linalg", "nn", "optim", "random"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_shows_its_parameters_and_what_it_does(name):
    function = getattr(md, name)
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    assert inspect.getdoc(function)
    if name not in ("dims", "einsum", "print", "rename", "static"):  # which take any number of them
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert inspect.Parameter.VAR_POSITIONAL not in kinds[:1]


def test_traced_tensors_and_arrays_are_tensors():
    assert issubclass(md.TracedTensor, md.Tensor)
    assert issubclass(md.NamedArray, md.Tensor)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("matmul", ": write md.einsum(x, y, over='dim')"),
        ("ones_like", ": write md.ones(x.dims, x.dtype)"),
        ("pmap", ": write md.jit(f, mesh, layout)"),
        ("concatenate", ": write md.concat([x, y], 'dim')"),
        ("softmx", ". Did you mean `softmax`"),
        ("nothing_like_it", "'nothing_like_it'"),
    ],
)
def test_a_name_that_there_is_not_is_answered_with_the_one_there_is(name, advice):
    with pytest.raises(AttributeError) as error:
        getattr(md, name)
    assert f"module 'meshdsl' has no attribute {name!r}" in str(error.value)
    assert advice in str(error.value)
