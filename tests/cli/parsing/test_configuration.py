"""Flags in a file: typed as TOML, replaced by those of the command line; mistakes have lines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.cli import flags, main
from meshdsl.cli.parsing import configuration
from meshdsl.cli.parsing.table import FLAGS
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh

EVERYTHING = """
model = "gpt_mini"
steps = 1000
learning_rate = 3e-4
overlap = true
packing = false
mesh_shape = {data = 2, model = 4}
weight_decay_except = ["embedding", "blocks/*/router"]
policy = {params = "float32", compute = "bfloat16"}
memory = "16GiB"

[layout]
batch = "data"
heads = "-"
"params/embed" = ["data", "model"]
"""


def read(tmp_path, text, *arguments, command="train"):
    path = tmp_path / "run.toml"
    path.write_text(text)
    values, problems = flags.read([f"--config={path}", *arguments], command)
    return values, [problem.replace(f"{tmp_path}/", "") for problem in problems.found]


def test_settings_are_flags(tmp_path):
    values, problems = read(tmp_path, EVERYTHING)
    typed, _ = flags.read(
        [
            "--model=gpt_mini",
            "--steps=1000",
            "--learning_rate=3e-4",
            "--overlap",
            "--nopacking",
            "--mesh_shape=data:2,model:4",
            "--weight_decay_except=embedding,blocks/*/router",
            "--policy=params=float32,compute=bfloat16",
            "--memory=16GiB",
            "--layout=batch:data; heads:-; params/embed:data+model",
        ]
    )
    assert not problems
    for name in FLAGS:
        assert getattr(values, name) == getattr(typed, name), name
        assert bool(values[name].present) == bool(typed[name].present), name
    assert values.mesh_shape == Mesh.parse("data:2,model:4")
    assert values.layout == Layout.parse("batch:data; heads:-; params/embed:data+model")


def test_the_command_line_replaces_settings(tmp_path):
    text = 'steps = "many"\noverlap = true\nlayout = ["batch:data", "embed:data"]'
    given = ("--steps=3", "--nooverlap", "--layout=heads:data", "--layout=d_ff:data")
    values, problems = read(tmp_path, text, *given, command="sweep")
    assert (values.steps, values.overlap) == (3, False) and not problems
    assert values.layout == ["heads:data", "d_ff:data"]


def test_a_sweep_takes_lists(tmp_path):
    text = 'mesh_shape = ["data:2", {data = 4}]\nlayout = [{batch = "data"}, "embed:data"]'
    values, problems = read(tmp_path, text, command="sweep")
    assert values.mesh_shape == ["data:2", "data:4"] and not problems
    assert values.layout == ["batch:data", "embed:data"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'modle = "x"\nstesp = 3\n',
            [
                "run.toml, line 1: unknown setting modle. Did you mean `model`?",
                "run.toml, line 2: unknown setting stesp. Did you mean `step` or `steps`?",
            ],
        ),
        ('\n[optimizer]\nname = "lion"', ["run.toml, line 2: optimizer is a table, which layout,"]),
        ("steps = 2024-01-01", ["run.toml, line 1: steps has a value that no flag takes"]),
        ("steps = 0", ["--steps (run.toml, line 1): needs a whole number of at least 1, got '0'"]),
        ("[layout]\nbatch = 'a,b'", ["--layout (run.toml, line 1): malformed layout"]),
        (
            "[layout]\nsteps = 3",
            ["run.toml, line 1: layout has steps = 3, which is no rule"],
        ),
        (
            "[layout]\nparams.embed = 'data'",
            ["run.toml, line 1: layout has a table params in it. If params is"],
        ),
        ("batch_size = [8, 16]", ["run.toml, line 1: batch_size is a list, which its flag does"]),
        ("trainable = ['a', 'b,c']", ["run.toml, line 1: trainable has a comma in 'b,c'"]),
        ("steps = =", ["--config: run.toml is not TOML: Invalid value (at line 1, column 9)"]),
        ("steps = 1\nsteps = 2", ["--config: run.toml is not TOML: Cannot overwrite a value"]),
    ],
)
def test_mistakes_name_the_file_and_the_line(tmp_path, text, says):
    _, problems = read(tmp_path, text)
    assert len(problems) == len(says)
    for problem, start in zip(problems, says, strict=True):
        assert problem.startswith(start)


def test_a_file_that_is_not_there_is_named():
    _, problems = flags.read(["--config=not/there.toml"])
    assert problems.found == ["--config: not/there.toml cannot be read: No such file or directory"]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["model", "steps", "learning_rate", "overlap", "prompt", "layout", "data"]),
        st.one_of(
            st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
            st.sampled_from(["true", "007", "1e-3", "-0", "1.50", "3", "nan", "+1", "1_0", ".5"]),
            st.integers().map(str),
            st.floats(allow_nan=False).map(str),
        ),
    )
)
def test_what_is_printed_reads_back(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("config") / "run.toml"
    text = configuration.shown("train", {name: [one] for name, one in texts.items()}, {"seed": "0"})
    path.write_bytes(text.encode())
    found = configuration.read(str(path), FLAGS, (), ())
    assert found.arguments == tuple(f"--{name}={one}" for name, one in texts.items())
    assert not found.problems


def test_print_config_writes_a_file_for_the_same_run(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(EVERYTHING)
    first = main.run(
        ["explain", f"--config={tmp_path}/run.toml", "--batch_size=8", "--print_config"]
    )
    printed = capsys.readouterr().out
    assert first == 0 and "batch_size = 8" in printed and "# remat: none\n" in printed
    (tmp_path / "again.toml").write_text(printed)
    assert main.run(["explain", f"--config={tmp_path}/again.toml", "--print_config"]) == 0
    assert capsys.readouterr().out == printed


def test_print_config_reports_mistakes(capsys):
    assert main.run(["train", "--steps=none", "--print_config"]) == 2
    assert "--steps: needs a whole number" in capsys.readouterr().err
