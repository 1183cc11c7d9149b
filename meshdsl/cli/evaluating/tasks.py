"""`meshdsl evaluate --tasks`: the scores of a trained model in tasks of lm-evaluation-harness.

Tasks in files of YAML need no network, unless their data does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from meshdsl.cli.checkpointed import (
    DATE,
    OF_MODEL,
    Trained,
    begin_token,
    chat_template,
    check_mesh_and_out,
    place_of,
    reads_begin_tokens,
    stop_tokens,
)
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.tensors.dims import did_you_mean

if TYPE_CHECKING:
    from meshdsl.training.checkpointing.stored_params import StoredParams
    from meshdsl.training.data.tokenizers import Tokenizer

FLAGS = ("num_fewshot", "limit", "chat")
_OF_TEXT = ("data", "data_column", "split", "packing", "eval_batches", "precision")


@dataclass(frozen=True)
class TaskScores:
    """The results of tasks.

    Attributes:
        step: of the checkpoint; None: the model has none.
        folder: of the checkpoint.
        results: by task and by group, metrics by their names in the harness: "acc,none".
        examples: how many each task has asked.
    """

    step: int | None
    folder: str
    results: Mapping[str, Mapping[str, Any]]
    examples: Mapping[str, int]

    def lines(self, model: str) -> list[str]:
        """Returns what is printed: the checkpoint, and a line for each task."""
        head = [] if self.step is None else [f"{model} after step {self.step:,}, {self.folder}"]
        return [*head, *(self._line(task) for task in self.results)]

    def _line(self, task: str) -> str:
        results, metrics = self.results[task], []
        for key, value in results.items():
            name, _, filtered = key.partition(",")
            if not filtered or name.endswith("_stderr"):
                continue
            error = results.get(f"{name}_stderr,{filtered}")
            shown = f"{value:.4f}" if isinstance(value, float) else f"{value}"
            within = f" ± {error:.4f}" if isinstance(error, float) else ""
            metrics.append(
                f"{name}{'' if filtered == 'none' else f' ({filtered})'} {shown}{within}"
            )
        count = f"; {self.examples[task]:,} examples" if task in self.examples else ""
        return f"{task}: {', '.join(metrics)}{count}"

    @property
    def content(self) -> dict[str, Any]:
        """What `--out` gets."""
        results = {task: dict(results) for task, results in self.results.items()}
        return {"step": self.step, "tasks": results, "examples": dict(self.examples)}


def score(values: flags.FlagValues, problems: Problems) -> TaskScores:
    """Scores the model of the flags in their tasks.

    Raises:
        ValueError: the user's mistakes, as many as possible in one error.
    """
    manager, names = _asked(values, problems)
    trained = Trained.of(values, problems, (*OF_MODEL, "length"))
    stored, model, tokenizer = trained.stored, trained.model, trained.tokenizer
    template = chat_template(values, problems, DATE) if values.chat else None
    if values.chat and template is None and not problems.found:
        problems.add("--chat: the tokenizer has no template of chats; give one: --chat_template")
    end_tokens = stop_tokens(values, tokenizer, problems)
    begin = begin_token(values, tokenizer, stored)
    for name in _OF_TEXT:
        if values[name].present:
            problems.add(f"--{name} does nothing for --tasks, which have text of their own")
    check_mesh_and_out(values, problems)
    problems.check()
    assert model is not None and tokenizer is not None

    from lm_eval import simple_evaluate

    from meshdsl.generation.harness import HarnessModel

    lm = HarnessModel(
        model,
        tokenizer,
        length=values.length,
        batch_size=values.batch_size or model.batch_size,
        place=place_of(values),
        prefix=_prefix(values, tokenizer, stored) if begin is None else begin,
        begins=begin is not None,
        template=template,
        stop_tokens=end_tokens if values.chat else frozenset(),
    )
    lm.load(trained.load(lm.scorer.like, lm.scorer.places()))
    evaluated = simple_evaluate(
        lm,
        tasks=names,
        task_manager=manager,
        num_fewshot=values.num_fewshot,
        limit=values.limit,
        apply_chat_template=values.chat,
        log_samples=False,
    )
    examples = {task: counts["effective"] for task, counts in evaluated["n-samples"].items()}
    step, folder = (None, "") if stored is None else (stored.step, str(stored.folder))
    results = {**evaluated["results"], **evaluated.get("groups", {})}
    return TaskScores(step, folder, results, examples)


def _asked(values: flags.FlagValues, problems: Problems) -> tuple[Any, list[str]]:
    """Returns the harness's manager of tasks, and the names and files of those that are asked."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        problems.add("--tasks needs lm-evaluation-harness: pip install 'meshdsl[lm_eval]'")
        return None, []
    names = [name for name in values.tasks.split(",") if name.strip()]
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    # The harness reads thousands of files to know its own tasks.
    manager = TaskManager(include_defaults=len(files) < len(names))
    asked = []
    for name in (each.strip() for each in names):
        if name in files:
            path = Path(name).expanduser()
            if path.is_file():
                asked.append(str(path.absolute()))
            else:
                problems.add(f"--tasks: there is no file {name}")
        elif matches := manager.match_tasks([name]):
            asked += matches
        else:
            near = did_you_mean(name, manager.all_tasks)
            problems.add(f"--tasks: lm-evaluation-harness has no task {name!r}{near}")
    if not names:
        problems.add("--tasks: name some, as in --tasks=hellaswag,my_task.yaml")
    return manager, asked


def _prefix(
    values: flags.FlagValues, tokenizer: Tokenizer, stored: StoredParams | None
) -> int | None:
    """Returns the token that a text without another one before it follows; None: the end token."""
    from meshdsl.generation.serving.chat import bos_token_of

    if not (isinstance(values.tokenizer, str) and reads_begin_tokens(values, stored)):
        return None
    return bos_token_of(tokenizer, values.tokenizer)
