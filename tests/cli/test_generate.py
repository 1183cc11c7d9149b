"""`meshdsl generate`: text from the checkpoint of a run, or from weights."""

import io
import json
import sys

import pytest

from meshdsl.cli import generate
from meshdsl.cli.main import run
from tests.cli.commands import check_standard_output, needs_full_disk

MODEL = "--model_args=layers=1,embed=16,heads=2,policy.compute=bfloat16"
JOB = (MODEL, "--batch_size=8", "--length=16", "--backend=numpy", "--steps=2", "--eval_batches=1")
MESH = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;params/embed:data")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The workdir of a run whose settings differ from the defaults."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    policy = "--policy=params=float32,compute=bfloat16"
    job = ["train", *JOB, policy, f"--data={folder}/text.txt", f"--workdir={folder}/run"]
    assert run(job) == 0
    return folder / "run"


def answer(capsys, *arguments):
    capsys.readouterr()
    code = run(["generate", "--backend=numpy", "--max_tokens=12", *arguments])
    return code, *capsys.readouterr()


def written(capsys, *arguments):
    code, out, err = answer(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


def refused(capsys, *arguments):
    code, out, err = answer(capsys, *arguments)
    assert (code, out) == (2, "")
    return err.removeprefix("meshdsl generate: ").rstrip("\n")


def test_a_text_follows_its_prompt_on_every_mesh(capsys, trained):
    given = (f"--workdir={trained}", "--prompt=A named", "--top_k=50", "--seed=4")
    text = written(capsys, *given)
    assert text.startswith("A named") and text.endswith("\n") and len(text) > len("A named\n")
    assert written(capsys, *given, *MESH) == text
    assert written(capsys, *given, "--layout=memory_length:model", MESH[0]) == text
    assert written(capsys, *given[:-1], "--seed=5") != text


def test_a_text_is_shown_as_it_is_written(monkeypatch, trained):
    class Screen(io.StringIO):
        shown = 0

        def flush(self):
            self.shown += 1

    monkeypatch.setattr(sys, "stdout", screen := Screen())
    line = ["generate", "--backend=numpy", f"--workdir={trained}", "--prompt=A", "--max_tokens=20"]
    assert run([*line, "--temperature=0"]) == 0
    assert screen.shown > 10


def test_several_prompts_of_different_lengths(capsys, trained):
    given = (f"--workdir={trained}", "--temperature=0.7", "--repetition_penalty=1.2")
    prompts = ("A named", "", "dimension with a na")
    text = written(capsys, *given, *(f"--prompt={prompt}" for prompt in prompts))
    for number, prompt in enumerate(prompts, start=1):
        assert f"[{number}] {prompt}" in text
    (alone,) = written(capsys, *given, "--prompt=A named").splitlines()
    assert text.startswith(f"[1] {alone}")  # its draws are the same alone


def test_beams_find_a_text_that_every_mesh_finds(capsys, tmp_path, trained):
    exact = "--policy=params=float32,compute=float32"  # in bfloat16 many texts are ties
    given = (f"--workdir={trained}", "--prompt=A named", "--beams=3", exact)
    text = written(capsys, *given)
    assert text.startswith("A named") and text.endswith("\n")
    assert written(capsys, *given, "--seed=5", "--temperature=0", *MESH) == text
    both = written(capsys, *given, "--prompt=dimension with a na", "--batch_size=2")
    assert both.startswith(f"[1] {text}[2] dimension with a na")
    written(capsys, *given, f"--out={tmp_path}/o.jsonl")
    line = json.loads((tmp_path / "o.jsonl").read_text())
    written(capsys, *given, "--length_penalty=0.5")
    assert line["prompt"] + line["text"] + "\n" == text


def test_beams_and_draws_are_not_mixed(capsys, trained):
    given = (f"--workdir={trained}", "--prompt=a")
    told = refused(capsys, *given, "--beams=2", "--top_k=3", "--temperature=0.5")
    assert "--temperature: a search with --beams=2 draws nothing; leave it out" in told
    assert "--top_k: a search" in told
    assert refused(capsys, *given, "--length_penalty=2") == (
        "--length_penalty is for a search: give --beams too, as in --beams=4"
    )


def test_stop_strings_and_batches_of_a_file(capsys, tmp_path, trained):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "A", "id": 7}\n\n{"prompt": "ü"}\n{"prompt": ""}\n'
    )
    out = tmp_path / "o.jsonl"
    given = (f"--workdir={trained}", f"--prompts={tmp_path}/p.jsonl", "--batch_size=2")
    told = written(capsys, *given, f"--out={out}", "--min_p=0.01", "--top_p=0.9")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["A", "ü", ""]
    assert lines[0]["id"] == 7 and list(lines[1]) == ["prompt", "text", "finish", "tokens"]
    total = sum(line["tokens"] for line in lines)
    assert told.startswith(f"3 texts, {total:,} bytes in {out}; ended ")
    apart = answer(capsys, *given, "--out=-", "--min_p=0.01", "--top_p=0.9")
    assert apart[:2] == (0, out.read_text())
    assert apart[2].startswith(f"3 texts, {total:,} bytes; ended ")
    letter = lines[0]["text"][2]
    again = [*given, f"--out={tmp_path}/s.jsonl", "--min_p=0.01", "--top_p=0.9"]
    written(capsys, *again, f"--stop={letter}", "--stop=never \\n comes")
    stopped = json.loads((tmp_path / "s.jsonl").read_text().splitlines()[0])
    assert stopped["text"] == lines[0]["text"].split(letter)[0]
    assert stopped["finish"] == "stop"
    assert f"--out: {out} is there already" in refused(capsys, *given, f"--out={out}")


def test_a_terminal_shows_control_characters_and_does_not_obey_them(capsys, trained, monkeypatch):
    given = (f"--workdir={trained}", "--prompt=a\x1b[2J\tb\x9b\n", "--max_tokens=1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert written(capsys, *given).startswith("a\u241b[2J\tb\ufffd\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert written(capsys, *given).startswith("a\x1b[2J\tb\x9b\n")


def test_keys_of_results_are_refused_in_a_file_of_prompts(capsys, tmp_path, trained):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "A", "text": "B"}\n{"prompt": "C", "finish": 1}\n'
    )
    given = (f"--workdir={trained}", f"--prompts={tmp_path}/p.jsonl", f"--out={tmp_path}/o.jsonl")
    assert "p.jsonl have text, finish, which --out writes itself" in refused(capsys, *given)


def test_lines_of_text_are_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert generate._read(tmp_path / "p.txt") == [{"prompt": "one"}, {"prompt": "two"}]


def test_weights_write_the_same_as_their_checkpoint(capsys, tmp_path, trained):
    out = tmp_path / "weights.safetensors"
    assert run(["export", f"--workdir={trained}", f"--out={out}"]) == 0
    given = ("--prompt=A named", "--temperature=0")
    text = written(capsys, *given, f"--workdir={trained}", "--step=2")
    policy = "--policy=params=float32,compute=bfloat16"
    assert written(capsys, *given, f"--init_from={out}", MODEL, policy) == text


def test_mistakes_are_reported_together(capsys, tmp_path, trained):
    assert refused(capsys, f"--workdir={tmp_path}", "--top_p=2", "--layout=batch:data") == (
        "4 problems\n\n"
        f"  1. --workdir: {tmp_path}/checkpoints has no checkpoint\n"
        "  2. --prompt is the text to go on from; give it once or several times, or a file of them "
        "with --prompts\n"
        "  3. sampling: top_p=2.0: needs to be above 0 and at most 1\n"
        "  4. --layout needs a mesh: give --mesh_shape, as in "
        '--mesh_shape="data:2,model:4"'
    )
    assert refused(capsys, "--prompt=a") == (
        "--workdir says whose checkpoint to use, as in --workdir=runs/first; --init_from takes "
        "weights instead"
    )
    both = refused(capsys, f"--workdir={trained}", "--init_from=b", "--prompt=a")
    assert "--workdir and --init_from: give one of them; both have parameters" in both
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n{\n')
    told = refused(capsys, f"--workdir={trained}", f"--prompts={tmp_path}/p.jsonl")
    assert told.startswith(
        f"--prompts: {tmp_path}/p.jsonl is no file of prompts\n"
        '  line 2: needs {"prompt": "..."}\n'
        "  line 3: Expecting property name"
    )


def test_a_checkpoint_of_another_model_or_step(capsys, trained):
    given = (f"--workdir={trained}", "--prompt=a")
    told = refused(capsys, *given, "--model_args=layers=1,embed=32,heads=2")
    assert told.startswith(f"checkpoint {trained}/checkpoints/2 is of another model\n  embedding: ")
    assert "f32[vocab=256, embed=16] in the checkpoint, f32[vocab=256, embed=32] in the" in told
    assert refused(capsys, *given, "--step=1") == (
        f"--workdir: {trained}/checkpoints has no checkpoint of step 1; it has 2"
    )
    assert refused(capsys, *given, "--model=bert_mini", "--model_args=") == (
        "--model: bert_mini does not write text: decoder-only transformers and T5 do, and a Model "
        "of your own with a `decoding`"
    )


def test_a_tokenizer_of_another_vocabulary(capsys, tmp_path, trained):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"</s>": 0, **{f"w{n}": n for n in range(1, 300)}}
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "</s>")).save(str(file))
    told = refused(capsys, f"--workdir={trained}", "--prompt=a", f"--tokenizer={file}")
    assert f"--tokenizer: {file} here, none in {trained}/checkpoints/2; leave the flag out" in told
    assert "makes tokens of a vocabulary of 300, but gpt_mini has 256" in told


def test_a_prompt_that_is_longer_than_the_positions(capsys, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A named dimension. " * 200)
    model = "--model_args=layers=1,embed=16,heads=2,positions=learned,max_length=20"
    job = ("--batch_size=4", "--length=16", "--backend=numpy", "--steps=1", "--eval_batches=1")
    where = f"--workdir={tmp_path}/run"
    assert run(["train", model, *job, f"--data={tmp_path}/text.txt", where]) == 0
    assert refused(capsys, where, f"--prompt={'a' * 21}", "--prompt=b") == (
        "--prompt: number 1 has 21 bytes, but gpt_mini reads at most 20: shorten it"
    )
    assert refused(capsys, where, f"--prompt={'a' * 15}") == (
        "--max_tokens=12: gpt_mini has positions for 6 more bytes after a prompt of 15; take "
        "--max_tokens=6"
    )
    assert written(capsys, where, f"--prompt={'a' * 15}", "--max_tokens=6").startswith("a" * 15)


@needs_full_disk
def test_a_full_disk_is_an_error_and_a_closed_pipe_is_none(capsys, monkeypatch, trained):
    given = (f"--workdir={trained}", "--prompt=A", "--out=-")
    check_standard_output(lambda: answer(capsys, *given), monkeypatch)
