"""Folders of Hugging Face on the command line: in, through a run, and out again."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshdsl.cli.checkpointed import begin_token, stored_params
from meshdsl.cli.flags import read
from meshdsl.cli.main import run
from meshdsl.cli.mistakes.early_checks import DEFAULTS
from meshdsl.training.checkpointing.exporting import Exported
from meshdsl.training.checkpointing.saving import differences
from meshdsl.training.data.token_files import write_token_file
from tests.models.huggingface.folders import CONFIGS, tensors_of, write_folder

BYTES = CONFIGS["llama 2"] | {"vocab_size": 300}
WHEN = ("--steps=1", "--learning_rate=0", "--log_every=1", "--eval_batches=1", "--backend=numpy")
SMALL = ("--batch_size=4", "--length=16")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    return f"--data={tmp_path}/text.txt"


def test_a_folder_is_trained_and_written_again(capsys, tmp_path, text):
    """Without a learning rate the weights stay, bit for bit."""
    folder = write_folder(tmp_path / "in", BYTES)
    (folder / "tokenizer_config.json").write_text("{}")
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;params/embed:data")
    workdir = f"--workdir={tmp_path}/run"
    assert run(["train", f"--init_from={folder}", text, *SMALL, *WHEN, *mesh, workdir]) == 0
    out = tmp_path / "out"
    capsys.readouterr()
    assert run(["export", workdir, f"--out={out}", "--format=hf"]) == 0
    count = sum(array.size for array in tensors_of(folder).values())
    assert (
        f"{count:,} parameters after step 1 in {out}/model.safetensors" in capsys.readouterr().out
    )
    after = load_file(out / "model.safetensors")
    for name, array in tensors_of(folder).items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    settings = json.loads((out / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["vocab_size"] == 300
    assert (out / "tokenizer_config.json").read_text() == "{}"

    assert run(["evaluate", f"--init_from={out}", text, *SMALL, "--backend=numpy"]) == 0
    of_folder = capsys.readouterr().out
    assert run(["evaluate", workdir, text, *SMALL, "--backend=numpy"]) == 0
    assert of_folder.strip() in capsys.readouterr().out


def test_a_folder_brings_its_tokenizer(capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["</s>", "a", "named", "dimension"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = write_folder(tmp_path / "in", CONFIGS["gpt2"] | {"vocab_size": 4})
    model.save(str(folder / "tokenizer.json"))
    how = ("--max_tokens=3", "--temperature=0", "--backend=numpy")
    assert run(["generate", f"--init_from={folder}", "--prompt=a named", *how]) == 0
    written = capsys.readouterr().out
    assert written.startswith("a named") and {*written.split()} <= {*words}


def test_texts_beyond_those_that_a_folder_has_learned_from_are_told_of(capsys, tmp_path):
    folder = write_folder(tmp_path / "in", BYTES)
    given = ["generate", f"--init_from={folder}", "--temperature=0", "--backend=numpy"]
    assert run([*given, f"--prompt={'a' * 60}", "--max_tokens=4"]) == 0
    assert capsys.readouterr().err == ""
    assert run([*given, f"--prompt={'a' * 60}", "--max_tokens=5"]) == 0
    assert capsys.readouterr().err == (
        f"note: texts of up to 65 tokens are longer than the 64 that {folder} has learned from "
        "(max_position_embeddings): what is beyond may be bad\n"
    )
    dynamic = write_folder(tmp_path / "dynamic", CONFIGS["llama, dynamic"] | {"vocab_size": 300})
    given[1] = f"--init_from={dynamic}"
    assert run([*given, f"--prompt={'a' * 60}", "--max_tokens=5"]) == 0
    assert capsys.readouterr().err == ""


def test_a_folder_of_an_architecture_that_is_not_here_is_told_once(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BYTES | {"model_type": "falcon"}))
    assert run(["generate", f"--init_from={tmp_path}", "--prompt=a"]) == 2
    told = capsys.readouterr().err
    assert told.count("has model_type='falcon'") == 1 and "problems" not in told


def test_the_tokenizer_of_a_run_goes_out_with_it(capsys, tmp_path, text):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["</s>", "a", "named", "dimension"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file, out = tmp_path / "mine.json", tmp_path / "out"
    model.save(str(file))
    small = "layers=1,embed=16,heads=2,kv_heads=2,kv=8,d_ff=32,vocab=300"
    job = ("--model=llama_7b", f"--model_args={small}", f"--tokenizer={file}", *SMALL, *WHEN)
    assert run(["train", *job, text, f"--workdir={tmp_path}/run"]) == 0, capsys.readouterr().err
    export = ["export", f"--workdir={tmp_path}/run", "--format=hf"]
    capsys.readouterr()
    assert run([*export, f"--out={out}"]) == 0
    assert "no tokenizer" not in capsys.readouterr().out
    assert (out / "tokenizer.json").read_bytes() == file.read_bytes()
    settings = json.loads((out / "config.json").read_text())
    assert [settings[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, 0, None]
    how = ("--max_tokens=3", "--temperature=0", "--backend=numpy")
    assert run(["generate", f"--init_from={out}", "--prompt=a named", *how]) == 0
    assert {*capsys.readouterr().out.split()} <= {*words}
    file.unlink()
    assert run([*export, f"--out={tmp_path}/other"]) == 0
    assert f"{file}, that of the run, is not there" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["tokens", "bytes"])
def test_the_tokens_of_a_run_on_token_files_are_of_no_known_meaning(capsys, tmp_path, text, kind):
    tokens = tmp_path / "tokens.bin"
    write_token_file(tokens, [np.arange(20)] * 200, np.dtype("uint16"))
    small = "layers=1,embed=16,heads=2,kv_heads=2,kv=8,d_ff=32,vocab=300"
    data = f"--data={tokens}" if kind == "tokens" else text
    job = ("--model=llama_7b", f"--model_args={small}", *SMALL, *WHEN, data, "--backend=numpy")
    assert run(["train", *job, f"--workdir={tmp_path}/run"]) == 0, capsys.readouterr().err
    tokens.unlink()  # the run may have been elsewhere
    capsys.readouterr()
    out = tmp_path / "out"
    assert run(["export", f"--workdir={tmp_path}/run", "--format=hf", f"--out={out}"]) == 0
    told = "reads bytes" if kind == "bytes" else "reads files of tokens, and was given no tokenizer"
    assert f"no tokenizer is in {out}: the run {told}\n" in capsys.readouterr().out
    settings = json.loads((out / "config.json").read_text())
    assert settings["eos_token_id"] == (None if kind == "tokens" else 0)


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (("tokenizer.model",), False),
        (("vocab.json", "merges.txt"), False),
        (("vocab.json", "tokenizer_config.json"), True),
    ],
)
def test_only_a_folder_without_any_tokenizer_is_told_of(
    capsys, tmp_path, monkeypatch, files, missing
):
    """`export` writes the folder; whether it has a tokenizer is decided by its files."""

    def export(workdir, out, *how):
        Path(out).mkdir()
        for name in files:
            (Path(out) / name).write_text("{}")
        return Exported(1, 1, (Path(out) / "model.safetensors",))

    monkeypatch.setattr("meshdsl.training.checkpointing.exporting.export", export)
    monkeypatch.setattr("meshdsl.cli.export.stored_params", lambda *given: None)
    monkeypatch.setattr("meshdsl.cli.export.model_of", lambda *given: None)
    out = tmp_path / "out"
    assert run(["export", f"--workdir={tmp_path}", f"--out={out}", "--format=hf"]) == 0
    told = f"no tokenizer is in {out}: the run reads bytes" in capsys.readouterr().out
    assert told == missing


def test_a_model_that_has_no_family_is_not_written(capsys, tmp_path, text):
    job = ("--model_args=layers=1,embed=16,heads=2", *SMALL, *WHEN)
    assert run(["train", *job, text, f"--workdir={tmp_path}/run"]) == 0
    out = ["export", f"--workdir={tmp_path}/run", "--format=hf"]
    assert run([*out, f"--out={tmp_path}/out"]) == 2
    assert "no family of Hugging Face has such models" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run([*out, "--out=mine.safetensors"]) == 2
    assert "--format=hf writes a folder: give --out=mine" in capsys.readouterr().err


def test_another_model_than_the_folder_s_is_told(capsys, tmp_path, text):
    folder = write_folder(tmp_path / "in", BYTES)
    assert run(["train", f"--init_from={folder}", "--model=gpt_mini", text, *WHEN]) == 2
    told = capsys.readouterr().err
    assert "blocks/mlp/w_gate: not of the model" in told


@pytest.mark.long
def test_adapters_of_a_folder_are_trained_alone_and_merged(capsys, tmp_path, text):
    """What is exported scores as the run does; weights without adapters are those of the folder."""
    folder, workdir = write_folder(tmp_path / "in", BYTES), f"--workdir={tmp_path}/run"
    mesh = ("--mesh_shape=data:2,model:2", "--layout=batch:data;heads:model;params/embed:data")
    how = (*WHEN[:1], "--learning_rate=0.1", *WHEN[2:], *SMALL, *mesh)
    lora = "--lora=blocks/**/query:2,blocks/mlp/w_out:3"
    assert run(["train", f"--init_from={folder}", text, *how, lora, workdir]) == 0
    assert "initialised, since it has none: adapters/" in capsys.readouterr().out
    out = tmp_path / "out"
    assert run(["export", workdir, f"--out={out}", "--format=hf"]) == 0
    before, after = tensors_of(folder), tensors_of(out)
    assert {*before} == {*after}
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {name.split(".", 3)[3] for name in changed} == {
        "self_attn.q_proj.weight",
        "mlp.down_proj.weight",
    }
    capsys.readouterr()
    scores = []
    for source in (f"--init_from={out}", workdir):
        assert run(["evaluate", source, text, *SMALL, "--backend=numpy"]) == 0
        scores.append([float(n) for n in re.findall(r"\d+\.\d+", capsys.readouterr().out)])
    np.testing.assert_allclose(*scores, rtol=1e-4)
    prompt = ("--prompt=a", "--max_tokens=3", "--temperature=0", "--backend=numpy")
    texts = []
    for source in (f"--init_from={out}", workdir):
        assert run(["generate", source, *prompt]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_adapters_that_cannot_be_had_are_told(capsys, text):
    assert run(["train", "--model=gpt_mini", text, "--lora=qery:2", "--steps=1"]) == 2
    assert "--lora: adapters: no parameter is meant by 'qery'. Did you mean `query`" in (
        capsys.readouterr().err
    )


def test_a_prompt_begins_with_the_token_of_the_folder(capsys, tmp_path):
    """The same weights and words, whose tokenizer puts a token before texts or does not."""
    tokenizers = pytest.importorskip("tokenizers")
    listed = ["</s>", "<s>", "a", "named", *(f"w{number}" for number in range(36))]
    words = {word: number for number, word in enumerate(listed)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(["<s>", "</s>"])
    how = ("--max_tokens=8", "--seed=3", "--backend=numpy")

    def written(folder, prompt, *more):
        capsys.readouterr()
        assert run(["generate", f"--init_from={folder}", f"--prompt={prompt}", *how, *more]) == 0
        return capsys.readouterr().out.removeprefix(prompt)

    search = ("--beams=2", "--length_penalty=2")
    bare = write_folder(tmp_path / "bare", CONFIGS["gpt2"] | {"vocab_size": 40})
    model.save(str(bare / "tokenizer.json"))
    begins = write_folder(tmp_path / "begins", CONFIGS["gpt2"] | {"vocab_size": 40})
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    model.save(str(begins / "tokenizer.json"))
    assert written(begins, "a named") == written(bare, "<s>a named")
    assert written(begins, "<s>a named") == written(bare, "<s>a named")
    assert written(begins, "a named") != written(bare, "a named")
    assert written(begins, "a named", *search) == written(bare, "<s>a named", *search)


def test_a_run_whose_documents_begin_with_a_token_is_used_with_it(capsys, tmp_path, text):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: n for n, word in enumerate(["</s>", "<s>", "A", "named", "dimension", "."])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    model.save(str(tmp_path / "t.json"))
    job = ("train", "--model_args=layers=1,embed=16,heads=2,vocab=6", *SMALL, *WHEN, text)
    job = (*job, f"--tokenizer={tmp_path}/t.json", "--backend=numpy")
    for name, flags, token in (("bare", (), None), ("begins", ("--begin_documents",), 1)):
        workdir = f"--workdir={tmp_path}/{name}"
        assert run([*job, workdir, *flags]) == 0
        values, problems = read([workdir], "evaluate")
        stored = stored_params(values, problems)
        assert begin_token(values, SimpleNamespace(begin=1), stored) == token
        values, problems = read([workdir, "--begin_documents=false"], "evaluate")
        stored = stored_params(values, problems)  # the flag says more than the run
        assert begin_token(values, SimpleNamespace(begin=1), stored) is None
        capsys.readouterr()
        assert run(["evaluate", workdir, "--backend=numpy", text, *SMALL]) == 0
    assert run([*job, f"--workdir={tmp_path}/bare", "--begin_documents"]) == 2
    assert "begin_documents: False in the checkpoint, True here" in capsys.readouterr().err
    assert run([*job, f"--workdir={tmp_path}/bare", "--begin_documents=false"]) == 0


def test_a_run_from_before_the_flag_goes_on_without_it():
    before, after = {"seed": "0"}, {"seed": "0", "begin_documents": "False"}
    assert differences(before, after, DEFAULTS) == []
    assert differences(before, {**after, "begin_documents": "True"}, DEFAULTS) == [
        "begin_documents: False in the checkpoint, True here"
    ]


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("name", ["tokens.bin", "chats.jsonl", "tokens.bin,chats.jsonl"])
def test_documents_that_begin_as_they_are_written_are_not_begun(capsys, tmp_path, command, name):
    write_token_file(tmp_path / "tokens.bin", [np.arange(9)] * 20, np.dtype("uint16"))
    talk = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    data = ",".join(f"{tmp_path}/{each}" for each in name.split(","))
    assert run([command, f"--data={data}", "--begin_documents", *SMALL]) == 2
    told = capsys.readouterr().err
    assert "--begin_documents: token files and chats begin as they are written; leave it" in told


def test_a_run_that_began_here_has_never_read_a_token_that_begins_texts(tmp_path):
    begins = SimpleNamespace(begin=3)
    folder = str(write_folder(tmp_path / "in", BYTES))
    for model, init_from, begin_documents, token in [
        ("gpt_mini", None, False, None),
        ("gpt_mini", None, True, 3),
        ("gpt_mini", "weights.safetensors", False, 3),
        (folder, None, False, 3),
    ]:
        flags = SimpleNamespace(model=model, init_from=init_from, begin_documents=begin_documents)
        assert begin_token(flags, begins) == token
        assert begin_token(flags, None) is None
