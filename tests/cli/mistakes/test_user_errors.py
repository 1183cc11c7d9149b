"""A model file that raises: the user's frames are shown, and the rest with --debug only."""

import pytest

from meshdsl.cli.main import run

MODEL = """import meshdsl as md
from meshdsl import nn
from meshdsl.models import Model

vocab, embed = md.dims(vocab=256, embed=8)


def init_tiny(key):
    {init}
    return {{"embedding": nn.initializers.normal(0.02)(key, [vocab, embed])}}


def loss_tiny(params, batch):
    {loss}
    x = md.take(params["embedding"], batch["tokens"], "vocab")
    logits = md.einsum(x, params["embedding"], over="embed")
    return md.mean(nn.softmax_cross_entropy(logits, batch["targets"], over="vocab"))


{module}
tiny = Model("tiny", init_tiny, loss_tiny)
"""
COMMANDS = {
    "train": ["--steps=1", "--batch_size=2", "--length=4"],
    "explain": ["--mesh_shape=data:2", "--layout=batch:data"],
    "compile": ["--topology=h100:2x1", "--mesh_shape=data:2", "--layout=batch:data"],
    "sweep": ["--mesh_shape=data:{1,2}", "--layout=batch:data"],
}


def answer(folder, capsys, command, *more, **parts):
    text = MODEL.format(**({"init": "pass", "loss": "pass", "module": ""} | parts))
    (folder / "my_model.py").write_text(text)
    code = run([command, f"--model={folder}/my_model.py:tiny", *COMMANDS[command], *more])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_the_frames_of_the_model_file_only(tmp_path, capsys, command):
    code, text = answer(tmp_path, capsys, command, loss='params["embeding"]')
    assert code == 2
    assert text.startswith(
        f"meshdsl {command}: KeyError: 'embeding'\n"
        f'  File "{tmp_path}/my_model.py", line 14, in loss_tiny\n'
        '    params["embeding"]\n'
    )
    assert text.endswith("(--debug shows the frames of meshdsl and of libraries as well)\n")
    assert text.count("File ") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_an_entry_that_the_batch_lacks_is_told_with_what_gives_the_entries(
    tmp_path, capsys, command
):
    code, text = answer(tmp_path, capsys, command, loss='batch["token"]')
    assert code == 2
    assert text == (
        f"meshdsl {command}: the loss reads token, tokens, targets of a batch that has targets, "
        "tokens: no `token` (did you mean `tokens`?)\n"
        f'  at {tmp_path.name}/my_model.py:14  batch["token"]\n'
        "  A Model's batch_spec gives the entries (meshdsl.models.Model)\n"
    )


def test_debug_shows_the_rest(tmp_path, capsys):
    with pytest.raises(KeyError, match="embeding") as error:
        answer(tmp_path, capsys, "explain", "--debug", loss='params["embeding"]')
    files = [str(entry.path) for entry in error.traceback]
    assert any(path.endswith("jit.py") for path in files)
    with pytest.raises(ValueError, match="needs a positive integer size") as error:
        answer(tmp_path, capsys, "explain", "--debug", module="md.dims(x=-1)")
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("parts", "head", "place"),
    [
        ({"init": "[].pop()"}, "IndexError: pop from empty list", "line 9, in init_tiny"),
        ({"module": "1 / 0"}, "ZeroDivisionError: division by zero", "line 20, in <module>"),
        ({"module": "def f(:"}, "SyntaxError: invalid syntax", "line 20\n"),
        ({"loss": "raise ValueError('mine')"}, "ValueError: mine", "line 14, in loss_tiny"),
        (
            {"module": "md.dims(x=-1)"},
            "--model: ValueError: dim `x` needs a positive integer size, got -1",
            "line 20, in <module>",
        ),
    ],
)
def test_errors_in_each_part_of_a_model_file(tmp_path, capsys, parts, head, place):
    code, text = answer(tmp_path, capsys, "explain", **parts)
    assert code == 2
    assert text.startswith(f"meshdsl explain: {head}\n")
    assert f'my_model.py", {place}' in text
    assert text.count("File ") == 1


def test_the_cause_of_an_error_is_shown_with_its_frames(tmp_path, capsys):
    loss = "try: params['a']\n    except KeyError as e: raise TypeError('no a') from e"
    _, text = answer(tmp_path, capsys, "explain", loss=loss)
    assert text.startswith("meshdsl explain: TypeError: no a\n")
    assert "caused by KeyError: 'a'\n" in text


def test_a_mistake_in_an_operation_needs_no_frames(tmp_path, capsys):
    code, text = answer(tmp_path, capsys, "explain", loss='params["embedding"].sum("embd")')
    assert code == 2
    assert text.startswith("meshdsl explain: sum: no dim `embd`")
    assert "my_model.py:14" in text
    assert "File" not in text
