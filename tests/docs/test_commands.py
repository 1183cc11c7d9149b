"""The command lines that the README and `docs/` show: their flags exist and can be read.

Those of `explain` run. Those that train run for two steps, as slow tests. The others run in
`test_shell.py`, page by page.
"""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

from meshdsl.cli import flags, main
from meshdsl.cli.parsing.table import ABOUT, FLAGS
from tests.docs.pages import PAGES, ROOT, blocks, name_of, prose

# Flags of other programs that pages name.
OTHERS = {
    "pytest": "cases first_case jax_every optimize seed slow half_precision",
    "tests.benchmarks": "jobs keep kills offloaded others processor profile seconds small workers",
    "tests.benchmarks.figures": "run",
    "gcloud": "worker command",
    "Megatron-LM": "bf16 fp16 lr save load",
    "mkdocs": "strict",
    "examples": "window",
    "sbatch": "signal requeue nodes ntasks",
    "any": "name",
}
SCHEDULERS = ("bash", "kubectl", "sbatch")  # they get files of `examples`
FOREIGN = {name for names in OTHERS.values() for name in names.split()}


def lines_of(page):
    """Returns the command lines of a page, each as its words."""
    for language in ("bash", "console"):
        for block in blocks(page, language):
            text = block.text.replace("\\\n", " ")
            for line in text.splitlines():
                if language == "bash" or line.startswith("$ "):
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                    yield from split(words)


def split(words):
    """Yields the commands of a line, between `&&` and `|`."""
    command = []
    for word in [*words, "&&"]:
        if not command and re.fullmatch(r"[A-Z_]+=.*", word):
            continue  # a variable of the command's environment
        if word in ("&&", "|", ">"):
            if command:
                yield command
            command = []
        else:
            command.append(word)


def with_files(folder):
    """Returns a folder with the files that pages show: each block of TOML is a `run.toml`."""
    for page in PAGES:
        for block in blocks(page, "toml"):
            (folder / "run.toml").write_text(block.text)
    return folder


COMMANDS = [
    pytest.param(command, id=f"{name_of(page)}-{number}")
    for page in PAGES
    for number, command in enumerate(lines_of(page))
]
MESHDSL = [
    one for one in COMMANDS if one.values[0][0].endswith("meshdsl") and "..." not in one.values[0]
]
RUN = {name: [one for one in MESHDSL if one.values[0][1] == name] for name in ("explain", "train")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_there_is(command, tmp_path, monkeypatch):
    monkeypatch.chdir(with_files(tmp_path))
    program, *rest = command
    program = program.removeprefix(".venv/bin/")
    if program == "meshdsl":
        name, *arguments = rest
        assert name in main.COMMANDS or name.startswith("--")
        if name in main.COMMANDS:
            words = [] if name in main.TAKES_WORDS else None
            _, problems = flags.read([a for a in arguments if a != "..."], name, words)
            assert problems.found == []
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1])
        paths = [word for word in rest[2:] if word.startswith("tests/")]
        assert all((ROOT / path).exists() for path in paths)
    elif program == "python":
        assert (ROOT / rest[0]).exists()
    elif program == "pip":
        extras = re.findall(r"\.\[(\w+)\]", " ".join(rest))
        assert all(f'"{extra}": [' in (ROOT / "setup.py").read_text() for extra in extras)
    else:
        assert program in ("python3", "curl", "export", "mkdocs", "source", "jupyter", *SCHEDULERS)
        assert all((ROOT / word).exists() for word in rest if word.startswith("examples/"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_flags_that_a_page_names_are_those_of_a_command(page):
    # `--bucket_bytes`, `--halves=batch`; names with a hyphen are never ours.
    switched_off = r"(?:no(?=overlap|compile_ahead))?"
    named = set(re.findall(rf"(?<![\w-])--{switched_off}([a-z]\w+)(?![\w-])", prose(page)))
    assert named - {*FLAGS} - FOREIGN <= {*ABOUT, "version"}


@pytest.mark.long
@pytest.mark.parametrize("command", RUN["explain"])
def test_what_explain_is_shown_with_runs(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main.run(command[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN["train"])
def test_what_train_is_shown_with_trains(command, tmp_path):
    few = ["--steps=2", "--batch_size=8", "--length=16", "--eval_batches=1", "--override"]
    if {"coordinator", "init_from", "hardware"} & {word.split("=")[0][2:] for word in command}:
        pytest.skip("it needs other processes, or what another command wrote")
    write_corpus(with_files(tmp_path))
    devices = ["--host_devices=8"] * (not any("host_devices" in word for word in command))
    # A process of its own: how many virtual devices there are is settled at their first use.
    line = [sys.executable, "-m", "meshdsl", *command[1:], *few, *devices]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def write_corpus(folder):
    """Writes what the command lines name: texts and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "corpus").mkdir()
    for number in range(1000):
        text = f"Text {number} to train on, word by word. " * 20
        (folder / "corpus" / f"{number}.txt").write_text(text)
    words = ["<|endoftext|>", *sorted(set(text.split()))]
    model = models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
