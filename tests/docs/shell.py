"""The command lines of pages and of help, as they run in tests: smaller, and which do not, and why.

Lines of one page run in one folder, in order, since one reads what another has written. What a line
reads that no line of its page writes is there before: a trained run, weights, texts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.docs.pages import PAGES, ROOT, blocks
from tests.models.huggingface.folders import CONFIGS, write_folder

# Patterns of command lines that no test runs, with the reason.
NOT_RUN = {
    r"pip install|-m venv|^source |^export ": "sets a shell up, with packages of an index",
    r"-m pytest|-m tests\.browser": "runs the tests",
    r"-m tests\.benchmarks|calibrate": "measures for minutes to hours",
    r"sbatch|kubectl|tpu_vm\.sh": "needs a cluster; tests/examples/test_pods.py reads its files",
    r"--coordinator=": "needs other hosts",
    r"^meshdsl compile": "compiles large models with libtpu, as test_compile.py small ones",
    r"--tasks=": "fetches benchmarks from the network",
}
# What makes a line small: flags that follow its own.
FEW = ["--batch_size=8", "--length=16", "--eval_batches=1"]
LESS = {
    "train": ["--steps=2", "--override", *FEW],
    "launch": ["--steps=2", "--override", *FEW],
    "evaluate": FEW,
    "generate": ["--max_tokens=4"],
    "explore": ["--plans=4"],
    "serve": ["--batch_size=2", "--length=128", "--port=0"],
}
LESS_OF_EXAMPLES = {
    "dpo.py": ["--steps=2", "--length=64"],
    "fine_tune.py": ["--first_steps=2", "--steps=2"],
    "fused_rms_norm.py": [],
    "language_model.py": ["--steps=2", "--layers=1", "--length=64"],
    "sweep.py": [],
}
ADDRESS = re.compile(r"http://[\d.]+:\d+")
MODELS = ("Llama-3.1-8B", "Qwen3-4B", "Qwen3-0.6B")  # folders of Hugging Face that lines name
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def reason_not_to_run(command: Sequence[str]) -> str | None:
    """Returns why no test runs a command; None for one that runs."""
    text = shlex.join(command).removeprefix(".venv/bin/").replace("'", "")
    return next((why for what, why in NOT_RUN.items() if re.search(what, text)), None)


def flag(command: Sequence[str], name: str) -> str | None:
    """Returns the value of a flag."""
    start = f"--{name}="
    return next((w.removeprefix(start) for w in command if w.startswith(start)), None)


def runs_of(command: Sequence[str]) -> list[str]:
    """Returns the folders of runs that a command reads."""
    name, *rest = command[1:]
    if name in ("plot", "runs"):
        words = [word for word in rest if not word.startswith("--")]
        return ["runs/a" if word == "runs" else word for word in words]
    workdir = flag(command, "workdir")
    reads = name in ("evaluate", "generate", "export", "serve")
    return [workdir] if reads and workdir else []


def smaller(command: Sequence[str]) -> list[str]:
    """Returns what runs for a command line: programs by their files, and less to do."""
    program, *rest = command
    rest = [word for word in rest if word != "..."]
    program = program.removeprefix(".venv/bin/")
    if program == "python":
        file = Path(rest[0]).name
        return [
            sys.executable,
            str(ROOT / rest[0]),
            *rest[1:],
            *LESS_OF_EXAMPLES.get(file, ["--steps=2"]),
        ]
    if program != "meshdsl":
        return [program, "--fail", *rest]  # curl: a refusal is an error
    less = list(LESS.get(rest[0], []))
    on_devices = rest[0] in ("train", "generate", "evaluate", "serve")
    if on_devices and flag(rest, "mesh_shape") and not flag(rest, "host_devices"):
        less.append("--host_devices=8")
    if "--measure=run" in rest:
        less += ["--batch_size=8", "--length=16"]
    rest = [re.sub("=/dev/shm/", "=copies/", word) for word in rest]
    return [sys.executable, "-m", "meshdsl", *rest, *less]


def environment() -> dict[str, str]:
    """Returns the variables of commands: this checkout, on CPUs, without the network."""
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **quick, "PYTHONPATH": str(ROOT)}


class Shell:
    """A folder in which the lines of a page run."""

    def __init__(self, folder: Path, runs: Callable[[], Path]) -> None:
        self.folder = folder
        self.runs = runs  # trains them: a run, and one of a model of Hugging Face
        self.servers: list[subprocess.Popen] = []
        self.address = ""

    def run(self, command: Sequence[str]) -> str:
        """Runs a command and returns what it prints. A server goes on, for the lines after it.

        Raises:
            AssertionError: it fails.
        """
        for run in runs_of(command):
            if not (self.folder / run).exists():
                which = "llama" if "--format=hf" in command else "gpt_mini"
                shutil.copytree(self.runs() / which, self.folder / run)
        line = [ADDRESS.sub(self.address, word) for word in smaller(command)]
        if command[1] == "serve" or "--live" in command:
            return self._serve(line)
        done = subprocess.run(
            line,
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=900,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, (
            f"{shlex.join(line)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def _serve(self, line: Sequence[str]) -> str:
        pipe = subprocess.PIPE
        server = subprocess.Popen(
            line,
            cwd=self.folder,
            env=environment(),
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.servers.append(server)
        seen = ""
        for text in server.stdout:
            seen += text
            if found := ADDRESS.search(text):
                self.address = found[0]
                return seen
        raise AssertionError(f"{shlex.join(line)} ended:\n{seen}")

    def close(self) -> None:
        """Ends its servers."""
        for server in self.servers:
            server.kill()
            server.communicate()


def write_files(folder: Path) -> None:
    """Writes what command lines name: texts, chats, weights, modules, settings."""
    text = "Text to train on, word by word. How do I split a dim? def class Once upon "
    for name in ("corpus", "books", "notes"):
        (folder / name).mkdir()
        for number in range(1000 if name == "corpus" else 200):
            suffix = "md" if name == "notes" else "txt"
            (folder / name / f"{number}.{suffix}").write_text(f"{number} {text}" * 40)
    chat = [{"role": "user", "content": "Split a dim?"}, {"role": "assistant", "content": text}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 200)
    pair = {"prompt": "How do I ", "chosen": "split a dim?", "rejected": "Once upon"}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 160)
    (folder / "prompts.jsonl").write_text(f"{json.dumps({'prompt': 'def '})}\n" * 2)
    (folder / "layouts.txt").write_text("batch:data; d_ff:model\ndata:8,model:64 | heads:model\n")
    for page, name in (("models", "my_models"), ("from-jax", "my_model")):
        first, *others = (b.text for b in blocks(ROOT / "docs" / "guides" / f"{page}.md", "python"))
        examples = [text for text in others if "def example()" in text]
        (folder / f"{name}.py").write_text("\n".join([first, *examples]))
    for page in PAGES:
        for block in blocks(page, "toml"):
            (folder / "run.toml").write_text(block.text)
    tokenizer = folder / "tokenizer.json"
    write_tokenizer(tokenizer, text)
    (folder / "models").mkdir()
    for name in MODELS:
        to = write_folder(folder / "models" / name, CONFIGS["llama 2"] | {"vocab_size": 300})
        shutil.copy(tokenizer, to)
        (to / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def write_tokenizer(file: Path, text: str) -> None:
    """Writes a tokenizer of the words of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|endoftext|>", *sorted(set(text.split()))]
    model = models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(file))


def needed(commands: Sequence[Sequence[str]], all_of_them: bool = False) -> Iterator[Sequence[str]]:
    """Yields the commands of a page that run in its folder, in order.

    Unless all of them do, those are left out that run by themselves in test_commands.py: `explain`,
    and training that no later line needs.
    """
    for number, command in enumerate(commands):
        if reason_not_to_run(command):
            continue
        alone = command[1] in ("explain", "train") and "..." not in command
        if alone and not all_of_them and not flag(command, "init_from"):
            workdir = flag(command, "workdir")
            later = (flag(other, "workdir") for other in commands[number + 1 :])
            if not workdir or workdir not in later:
                continue
        yield command


def get(address: str) -> str:
    """Returns a page of a server."""
    for _ in range(60):
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return answer.read().decode()
        except ConnectionError:
            time.sleep(0.5)
    raise AssertionError(f"{address} does not answer")
