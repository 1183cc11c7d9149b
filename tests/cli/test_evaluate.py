"""`meshdsl evaluate`: loss and perplexity of a checkpoint, on its held-out text or other; tasks."""

import json
import math
import re
import sys

import pytest

from meshdsl.cli.main import run
from tests.cli.commands import check_standard_output, needs_full_disk

MODEL = "--model_args=layers=1,embed=16,heads=2"
MESH = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;params/embed:data")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The workdir of a run with text to train on, to validate with, and to test with."""
    folder = tmp_path_factory.mktemp("trained")
    for number in range(10):
        text = f"A named dimension is a dimension with a name, or {number}. " * 30
        (folder / f"{number}.txt").write_text(text)
    sizes = (MODEL, "--batch_size=4", "--length=16", "--steps=3", "--eval_batches=100")
    where = (f"--data={folder}/*.txt", f"--workdir={folder}/run", "--backend=numpy")
    assert run(["train", *sizes, *where, "--split=60,20,20"]) == 0
    return folder / "run"


def answer(capsys, *arguments):
    capsys.readouterr()
    code = run(["evaluate", "--backend=numpy", *arguments])
    return code, *capsys.readouterr()


def scores(capsys, *arguments):
    """Returns the loss of each text, as printed."""
    code, out, err = answer(capsys, *arguments)
    assert (code, err) == (0, "")
    return {name: float(loss) for name, loss in re.findall(r"^(.*): loss ([\d.]+) nats", out, re.M)}


@pytest.fixture
def other(tmp_path):
    (tmp_path / "other.txt").write_bytes(b"Nothing like it, in any way! " * 40)
    return tmp_path / "other.txt"


def test_other_text_is_scored_whole_on_every_mesh(capsys, trained, other, tmp_path):
    given = (f"--workdir={trained}", f"--data={other}")
    code, out, _ = answer(capsys, *given, f"--out={tmp_path}/scores.json")
    assert code == 0
    apart = answer(capsys, *given, "--out=-")
    assert apart == (0, (tmp_path / "scores.json").read_text(), out)
    first, second = out.splitlines()
    assert first == f"gpt_mini after step 3, {trained}/checkpoints/3"
    written = json.loads((tmp_path / "scores.json").read_text())
    score = written["texts"][str(other)]
    windows = (29 * 40 + 1) // 17
    assert (written["step"], score["tokens"]) == (3, 16 * windows)
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    assert second == (
        f"{other}: loss {score['loss']:.4f} nats per byte, perplexity {score['perplexity']:,.3f}, "
        f"{score['bits_per_token']:.4f} bits per byte; {16 * windows:,} bytes"
    )
    (loss,) = scores(capsys, *given, *MESH).values()
    assert loss == pytest.approx(score["loss"], abs=2e-4)
    assert scores(capsys, *given, "--eval_batches=1") != scores(capsys, *given)
    code, out, _ = answer(capsys, *given, "--eval_batches=1")
    assert out.endswith(f"; 64 bytes in 4 of {windows} examples\n")


def test_a_long_evaluation_says_how_far_it_is(capsys, trained, other, monkeypatch):
    monkeypatch.setattr("meshdsl.cli.evaluate._PATIENCE", 0)
    code, _, err = answer(capsys, f"--workdir={trained}", f"--data={other}")
    *_, last = err.splitlines()
    assert (code, last) == (0, "68 of 68 examples")


def test_held_out_and_test_text_are_scored_apart(capsys, trained):
    losses = scores(capsys, f"--workdir={trained}")
    assert list(losses) == ["held-out text", "test text"]
    line = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    # The run left out the windows that fill no batch.
    assert losses["held-out text"] == pytest.approx(line["eval_loss"], abs=0.05)
    assert losses["test text"] == pytest.approx(line["test_loss"], abs=0.05)


def test_a_run_has_the_scores_of_its_own_held_out_text(capsys, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 237)
    held_out = (46 * 237 + 1) // 17 // 20
    sizes = (MODEL, f"--batch_size={held_out}", "--length=16", "--steps=2", "--eval_batches=9")
    where = (f"--data={tmp_path}/text.txt", f"--workdir={tmp_path}/run", "--backend=numpy")
    assert run(["train", *sizes, *where]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    wanted = json.loads(lines[-1])["eval_loss"]
    losses = scores(capsys, f"--workdir={tmp_path}/run")
    assert losses == {"held-out text": pytest.approx(wanted, abs=1e-4)}


def test_mistakes_are_reported(capsys, trained, tmp_path, other):
    def refused(*arguments):
        code, out, err = answer(capsys, *arguments)
        assert (code, out) == (2, "")
        return err

    message = refused(f"--workdir={tmp_path}", f"--data={tmp_path}/none.txt", "--model=gpt")
    assert message.startswith("meshdsl evaluate: 3 problems\n\n  1. --workdir: ")
    assert "\n  2. --model: unknown model 'gpt'" in message
    assert "\n  3. --data: " in message and "none.txt` matches no file" in message
    message = refused(f"--workdir={trained}", f"--data={other}", "--length=5000")
    assert message == (
        "meshdsl evaluate: the text is too short for one example of 5000 bytes: "
        f"{other}; give more, or a smaller --length\n"
    )
    message = refused(f"--workdir={trained}", "--model=resnet_mini", "--model_args=")
    assert "--model: resnet_mini is not evaluated on text: its batches are others" in message


@pytest.mark.parametrize("packing", ["false", "true"])
def test_chats_are_trained_on_and_scored_by_their_answers(capsys, tmp_path, packing):
    chat = [{"role": "user", "content": "a b c?"}, {"role": "assistant", "content": "zzzz zzzz"}]
    lines = "".join(json.dumps({"messages": chat}) + "\n" for _ in range(60))
    (tmp_path / "chats.jsonl").write_text(lines)
    template = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "mine.jinja").write_text(template)
    sizes = (MODEL, "--batch_size=4", "--length=16", "--steps=12", "--learning_rate=0.05")
    where = (f"--data={tmp_path}/chats.jsonl", f"--workdir={tmp_path}/run", "--backend=numpy")
    given = ("train", *sizes, *where, f"--packing={packing}")
    assert run(given) == 2
    assert "line 1: chats need the tokenizer's template" in capsys.readouterr().err
    assert run([*given, f"--chat_template={tmp_path}/mine.jinja"]) == 0
    losses = scores(capsys, f"--workdir={tmp_path}/run")
    assert losses["held-out text"] < 2  # four letters in turn; all bytes would take longer
    whole = scores(capsys, f"--workdir={tmp_path}/run", where[0])
    assert list(whole) == [f"{tmp_path}/chats.jsonl"]
    (tmp_path / "same.txt").write_text("<user>a b c?<assistant>zzzz zzzz\0" * 60)
    (of_text,) = scores(capsys, f"--workdir={tmp_path}/run", f"--data={tmp_path}/same.txt").values()
    assert of_text > whole[f"{tmp_path}/chats.jsonl"]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The file of a task."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    lines = [{"text": f"{n} and {n} are", "choices": ["e", "\x00"]} for n in range(9)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: choices\n'
        "doc_to_target: 0\nmetric_list:\n  - metric: acc\n    aggregation: mean\n"
        "    higher_is_better: true\n"
    )
    return tmp_path / "mine.yaml"


@pytest.mark.filterwarnings("ignore")  # the harness's libraries have warnings
def test_tasks_of_the_harness_are_asked(capsys, trained, task, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is the extra [lm_eval]")
    given = (f"--workdir={trained}", f"--tasks={task}", "--batch_size=4", *MESH)
    code, out, _ = answer(capsys, *given, f"--out={tmp_path}/scores.json", "--limit=8")
    assert code == 0
    first, second = out.splitlines()[-2:]
    assert first == f"gpt_mini after step 3, {trained}/checkpoints/3"
    written = json.loads((tmp_path / "scores.json").read_text())
    accuracy = written["tasks"]["mine"]["acc,none"]
    error = written["tasks"]["mine"]["acc_stderr,none"]
    assert (written["step"], written["examples"]) == (3, {"mine": 8})
    assert second == f"mine: acc {accuracy:.4f} ± {error:.4f}; 8 examples"
    code, out, _ = answer(capsys, *given[:2], "--limit=8")  # on one device, in other batches
    assert (code, out.splitlines()[-1]) == (0, second)

    wrong = "--tasks=helaswag,none.yaml"
    code, _, message = answer(capsys, f"--workdir={trained}", wrong, "--chat")
    assert code == 2
    unknown = "--tasks: lm-evaluation-harness has no task 'helaswag'. Did you mean `hellaswag`"
    assert unknown in message
    assert "--tasks: there is no file none.yaml" in message
    code, _, message = answer(capsys, *given, "--chat", "--eval_batches=3")
    assert "--chat: the tokenizer has no template of chats; give one: --chat_template" in message
    assert "--eval_batches does nothing for --tasks, which have text of their own" in message


def test_flags_of_tasks_need_tasks_and_tasks_need_the_harness(capsys, trained, monkeypatch):
    code, _, message = answer(capsys, f"--workdir={trained}", "--limit=3", "--chat")
    assert code == 2
    assert "--limit is for tasks: name some, as in --tasks=hellaswag" in message
    assert "--chat is for tasks: name some, as in --tasks=hellaswag" in message
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    code, _, message = answer(capsys, f"--workdir={trained}", "--tasks=hellaswag")
    assert code == 2
    assert message == (
        "meshdsl evaluate: --tasks needs lm-evaluation-harness: pip install 'meshdsl[lm_eval]'\n"
    )


@needs_full_disk
def test_a_full_disk_is_an_error_and_a_closed_pipe_is_none(capsys, monkeypatch, trained):
    given = (f"--workdir={trained}", "--eval_batches=1", "--out=-")
    check_standard_output(lambda: answer(capsys, *given), monkeypatch)
