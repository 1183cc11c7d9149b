"""What the command line answers: exit codes, and one clear message for every mistake."""

import subprocess
import sys

import jax
import pytest

from meshdsl.cli.main import run

SMALL = "--model_args=layers=1,embed=16,heads=2"


def answer(capsys, *arguments):
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments):
    code, out, err = answer(capsys, *arguments)
    assert (code, out) == (2, "")
    return err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_commands_are_listed(capsys, arguments):
    code, out, _ = answer(capsys, *arguments)
    assert code == 0
    assert out.startswith("usage: meshdsl <command> --flags\n")
    assert all(f"\n  {name} " in out for name in ("train", "explain", "compile", "sweep"))


@pytest.mark.parametrize("command", ["train", "explain", "compile", "sweep"])
def test_a_command_lists_its_flags(capsys, command):
    code, out, _ = answer(capsys, command, "--help")
    assert code == 0
    assert "--mesh_shape" in out


@pytest.mark.long
@pytest.mark.parametrize("module", ["meshdsl", "meshdsl.cli.main"])
def test_the_package_and_the_module_of_the_script_run_it(module):
    line = [sys.executable, "-m", module, "train", "--model=nonsense"]
    found = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("meshdsl train: ") and "nonsense" in found.stderr


def test_an_unknown_command(capsys):
    assert refused(capsys, "trian") == (
        "meshdsl: unknown command 'trian'; choose one of train, launch, explain, compile, plan, "
        "explore, sweep, calibrate, generate, serve, evaluate, export, runs, plot, names, doctor. "
        "Did you mean `train`?\n"
    )


@pytest.mark.parametrize("command", ["train", "explain"])
def test_mistakes_of_all_kinds_are_reported_together(capsys, command):
    message = refused(
        capsys,
        command,
        "--model=gpt_minni",
        "--mesh_shape=data2",
        "--layout=batch",
        "--sted=3",
        "--learning_rate=fast",
    )
    assert message.startswith(f"meshdsl {command}: 5 problems\n\n  1. unknown flag --sted. Did you")
    assert "\n  2. --mesh_shape: malformed mesh" in message
    assert "\n  3. --layout: malformed layout" in message
    assert "\n  4. --learning_rate: needs a number" in message
    assert "\n  5. --model: unknown model 'gpt_minni'. Did you mean `gpt_mini`" in message


def test_missing_data_is_reported_with_the_other_mistakes(capsys, tmp_path):
    pattern = f"{tmp_path}/nothing/*.txt"
    message = refused(capsys, "train", f"--data={pattern}", "--model=gpt")
    assert "1. --data: cannot read the text to train on (1 problem)" in message
    assert f"`{pattern}` matches no file; looked in {tmp_path}/nothing, which does not" in message
    assert "\n  2. --model: unknown model 'gpt'" in message


def test_too_little_text(capsys, tmp_path):
    (tmp_path / "little.txt").write_text("little")
    message = refused(capsys, "train", f"--data={tmp_path}/*.txt")
    told = "meshdsl train: the text is too short: it has 7 bytes in 1 document (2 problems)\n"
    assert message.startswith(told)


def test_a_layout_without_a_mesh(capsys):
    assert refused(capsys, "explain", "--layout=batch:data") == (
        "meshdsl explain: --layout needs a mesh: give --mesh_shape, as in "
        '--mesh_shape="data:2,model:4"\n'
    )


def test_more_warm_up_than_steps(capsys):
    assert refused(capsys, "explain", "--steps=10", "--warmup_steps=10") == (
        "meshdsl explain: --warmup_steps: warm-up and decay take 10 steps, which leaves none of "
        "total_steps=10\n"
    )


def test_a_vocabulary_without_all_bytes(capsys):
    assert refused(capsys, "explain", "--model_args=vocab=64") == (
        "meshdsl explain: --model: gpt_mini has a vocabulary of 64, but text is bytes and needs "
        "256: --model_args=vocab=256\n"
    )


def test_a_model_that_does_not_read_text(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import meshdsl as md\n"
        "from meshdsl.models import Model\n"
        "def spec(batch_size, length):\n"
        "    return {'image': md.spec(md.dims(batch=batch_size, pixel=length))}\n"
        "tiny = Model('tiny', init=None, loss=None, batch_spec=spec)\n"
    )
    assert refused(capsys, "train", f"--model={tmp_path}/mine.py:tiny") == (
        f"meshdsl train: --model: {tmp_path}/mine.py:tiny takes batches of image, but this "
        "command feeds text (tokens and targets); train it from Python, with "
        "meshdsl.training.loop.train\n"
    )


@pytest.mark.parametrize("command", ["train", "explain"])
def test_a_layout_that_does_not_fit_is_reported_before_anything_is_allocated(capsys, command):
    held = len(jax.live_arrays())
    code, _, message = answer(
        capsys, command, SMALL, "--mesh_shape=data:2,model:3", "--layout=btch:data;hedas:model"
    )
    assert code == 2
    assert message.startswith(
        f"meshdsl {command}: layout does not fit this program (2 problems)\n\n"
        "  1. `btch:data` names a dim that this program does not have. Did you mean `batch`?\n"
        "  2. `hedas:model` names a dim that this program does not have. Did you mean `heads`?\n"
    )
    assert message.endswith("\n\n  mesh    data:2 model:3\n  layout  btch:data; hedas:model\n")
    assert len(jax.live_arrays()) == held


def test_microbatches_that_do_not_divide_the_batch(capsys):
    assert refused(capsys, "explain", "--microbatches=6", "--model_args=vocab=64") == (
        "meshdsl explain: 2 problems\n\n"
        "  1. --model: gpt_mini has a vocabulary of 64, but text is bytes and needs 256: "
        "--model_args=vocab=256\n"
        "  2. --microbatches: microbatches=6 do not fit the batch\n"
        "       batch/targets, batch/tokens: 6 do not divide batch=16; take 4 or 8 microbatches, "
        "or a batch of 12 or 18\n"
    )


def test_rematerialisation_of_a_model_that_has_none(capsys):
    assert refused(capsys, "explain", "--model=resnet_mini", "--remat=full") == (
        "meshdsl explain: --remat: resnet_mini has no `remat` in its configuration; md.checkpoint "
        "around a part of the model computes that again\n"
    )


@pytest.mark.parametrize("command", ["train", "explain"])
def test_a_rule_without_effect_is_reported_in_one_line(capsys, command, tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 500)
    layout = "--layout=batch:data; heads:model; d_ff:model; kv:model?"
    small = f"{SMALL},positions=none"
    shapes = ("--mesh_shape=data:2,model:2", "--batch_size=4", "--length=8", layout)
    arguments = [small, *shapes, "--backend=numpy", f"--data={tmp_path}/*.txt", "--steps=1"]
    code, _, message = answer(capsys, command, *arguments, "--eval_batches=1")
    assert (code, message) == (
        0,
        f"meshdsl {command}: warning: `kv:model?` takes no axis anywhere: wherever it would, "
        "`heads:model` has it already. Leave the rule out, or give `kv` an axis that is free\n",
    )


@pytest.mark.parametrize("command", ["train", "explain"])
def test_an_option_without_effect_is_reported_in_one_line(capsys, command, tmp_path):
    """Once, although training lowers several programs."""
    (tmp_path / "text.txt").write_text("some text " * 500)
    arguments = [SMALL, "--backend=numpy", f"--data={tmp_path}/*.txt", "--context=gather"]
    sizes = ["--batch_size=2", "--length=16", "--steps=1", "--eval_batches=1"]
    code, _, message = answer(capsys, command, *arguments, *sizes)
    assert code == 0
    told = f"meshdsl {command}: warning: context=gather changes nothing: it needs "
    assert message.startswith(told)
    assert message.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "explain"])
def test_a_storage_rule_for_a_path_that_does_not_exist(capsys, command, tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 500)
    layout = "--layout=batch:data; params/blocks/atention/embed:data; gradient/embed:data"
    arguments = [SMALL, "--mesh_shape=data:2", "--batch_size=4", "--length=8", layout]
    code, _, message = answer(capsys, command, *arguments, f"--data={tmp_path}/*.txt")
    assert code == 2
    head, _, problems = message.partition("\n\n")
    assert head.endswith("layout does not fit this program (2 problems)")
    first, second = problems.splitlines()[:2]
    assert first.startswith(
        "  1. `params/blocks/atention/embed:data` fits no path of this program. Did you mean "
        "`params/blocks/attention/embed:data`? The nearest paths: `state/params/blocks/attention/"
    )
    assert second.startswith(
        "  2. `gradient/embed:data` fits no path of this program. Did you mean "
        "`gradients/embed:data`? The nearest paths: `gradients/params/"
    )


def test_a_mesh_larger_than_the_machine(capsys):
    code, _, message = answer(capsys, "train", SMALL, "--mesh_shape=data:16", "--layout=batch:data")
    assert code == 2
    assert "mesh data:16 needs 16 devices, but this machine has 8 (cpu)" in message
    assert "--host_devices=16" in message


def test_debug_shows_where_an_error_comes_from(capsys):
    with pytest.raises(ValueError, match="unknown model"):
        run(["explain", "--model=gpt", "--debug"])
