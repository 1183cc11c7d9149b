"""What commands need that use a trained model: its parameters, and the settings of its run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.parsing.record_flags import values_of
from meshdsl.lowering.options import Options
from meshdsl.training.data.chats import ChatFormat
from meshdsl.training.data.corpus import has_text
from meshdsl.training.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer
from meshdsl.training.reporting.output import tell

if TYPE_CHECKING:
    from meshdsl.generation import Place
    from meshdsl.generation.serving.chat import Template
    from meshdsl.models import Model
    from meshdsl.training.checkpointing.stored_params import StoredParams
    from meshdsl.training.checkpointing.weights import Weights

OF_MODEL = (
    "model",
    "model_args",
    "lora",
    "policy",
    "tokenizer",
    "end_token",
    "begin_documents",
)
STDOUT = "-"  # the value of --out for standard output
_FIXED = ("tokenizer", "end_token")  # another one makes other tokens, so the model reads nonsense
# For templates of data: tokens must not depend on the day. Llama's has this one if it knows none.
DATE = datetime(2024, 7, 26)
_FRACTION = re.compile(r"Fraction\((\d+), (\d+)\)")
_POLICY = re.compile(r"(\w+)=dtype\('?(\w+)'?\)")


@dataclass(frozen=True)
class Trained:
    """A trained model that a command uses; what a flag is wrong about is None.

    Attributes:
        stored: the parameters in the checkpoint of `--workdir`, if that is given.
        weights: those of `--init_from`, if that is given.
    """

    stored: StoredParams | None
    weights: Weights | None
    model: Model | None
    tokenizer: Tokenizer | None

    @staticmethod
    def of(
        values: flags.FlagValues, problems: Problems, settings: Sequence[str] = OF_MODEL
    ) -> Trained:
        """Returns the model of the flags, whose devices are used from now on.

        Args:
            settings: the flags that get the values of the run, unless the user sets them.
        """
        devices = values.host_devices
        jobs.use_host_devices(devices if isinstance(devices, int) else None)
        stored = stored_params(values, problems, settings)
        model = model_of(values, problems)
        of_folder = values.init_from is not None and values.model == values.init_from
        # What keeps a folder's model from being made is told once.
        weights = None if model is None and of_folder else weights_of(values, problems)
        return Trained(stored, weights, model, tokenizer_of(values, model, problems))

    def load(self, like: Any, places: Any) -> Any:
        """Returns the parameters where they are wanted.

        Raises:
            ValueError: they are of another model, or cannot be read.
        """
        if self.stored is not None:
            return self.stored.load(like, places)
        assert self.weights is not None
        return self.weights.load(like, places)


def tell_of_context(values: flags.FlagValues, model: Model, tokens: int) -> None:
    """Says so if texts are longer than those that the model of a folder has learned from.

    Rotary positions have no end, so such texts are written.

    Args:
        tokens: of the longest text, its prompt included.
    """
    config = model.config
    rotary = getattr(config, "positions", "") == "rotary" and config.rotary_scaling != "dynamic"
    if is_hugging_face(values.model) and rotary and tokens > (most := config.max_length):
        tell(
            f"note: texts of up to {tokens:,} tokens are longer than the {most:,} that "
            f"{values.model} has learned from (max_position_embeddings): what is beyond may be bad",
            error=True,
        )


def place_of(values: flags.FlagValues) -> Place:
    """Returns where the programs of the flags run, and how they are lowered."""
    from meshdsl.generation import Place

    options = Options(**values_of(Options, values))
    return Place(values.mesh_shape, values.layout, values.backend, options)


def stored_params(
    values: flags.FlagValues, problems: Problems, settings: Sequence[str] = OF_MODEL
) -> StoredParams | None:
    """Returns the parameters in the checkpoint of `--workdir`, if that is given.

    Flags that the user did not set get the values of the run.

    Args:
        settings: the names of these flags.
    """
    if not values.workdir:
        if values.init_from is None:
            problems.add(
                "--workdir says whose checkpoint to use, as in --workdir=runs/first; --init_from "
                "takes weights instead"
            )
        elif values.ema:
            problems.add("--ema: weights have no averages, only checkpoints of a --workdir do")
        return None
    if values.init_from is not None:
        problems.add("--workdir and --init_from: give one of them; both have parameters")
    if isinstance(values.step, Mistake):
        return None
    from meshdsl.training.checkpointing.stored_params import StoredParams

    stored = None
    with problems.caught("--workdir"):
        stored = StoredParams.of(values.workdir, values.step, values.ema)
    if stored is not None:
        _take_settings(values, stored, settings, problems)
    return stored


def _take_settings(
    values: flags.FlagValues, stored: StoredParams, names: Sequence[str], problems: Problems
) -> None:
    for name in names:
        saved = stored.config.get(name)
        flag = values[name]
        if not flag.present:
            if saved is not None:
                flag.parse(_readable(name, saved))
                if isinstance(flag.value, Mistake):
                    problems.add(f"--{name}: {flag.value.reason} (in {stored.folder})")
        elif name in _FIXED and stored.config and str(flag.value) != saved and not values.override:
            problems.add(
                f"--{name}: {flag.value} here, {saved or 'none'} in {stored.folder}; leave the "
                "flag out, or say --override if it makes the same tokens"
            )


def _readable(name: str, saved: str) -> str:
    """Returns a setting of a checkpoint as its flag reads it."""
    if name == "policy" and (pairs := _POLICY.findall(saved)):
        return ",".join(f"{key}={dtype}" for key, dtype in pairs)
    if name == "split":
        return ",".join(str(Fraction(int(n), int(d))) for n, d in _FRACTION.findall(saved))
    return saved


def is_hugging_face(path: Any) -> bool:
    """Whether a path names a folder of Hugging Face."""
    from meshdsl.models.huggingface import is_folder

    return isinstance(path, str) and is_folder(path)


def follow_init_from(values: flags.FlagValues) -> None:
    """Takes model and tokenizer from the folder of Hugging Face that `--init_from` names, if any.

    Flags that the user has given stay. Without a file of the `tokenizers` library in the folder,
    tokens are bytes, as always.
    """
    if is_hugging_face(values.init_from):
        _set_default(values, "model", values.init_from)
    if values["model"].present and is_hugging_face(values.model):
        file = Path(values.model).expanduser() / "tokenizer.json"
        if file.is_file():
            _set_default(values, "tokenizer", str(file))


def train_adapters(values: flags.FlagValues) -> None:
    """Has `--lora` train its adapters alone, unless the user says what is trained."""
    _set_default(values, "trainable", "adapters/**")


def _set_default(values: flags.FlagValues, name: str, text: str) -> None:
    flag = values[name]
    if not flag.present:
        flag.parse(text)
        flag.present, flag.using_default_value = 1, False  # the settings of the run have it


def model_of(values: flags.FlagValues, problems: Problems) -> Model | None:
    """Returns the model of the flags, with their policy; None if they do not give one."""
    from meshdsl.models import load, with_lora

    if isinstance(values.model, Mistake):
        return None
    with problems.caught("--model"):
        model = load(values.model, values.model_args)
        if values.lora is not None:
            model = with_lora(model, values.lora)
        if values.policy is not None and hasattr(model.config, "policy"):
            pairs = (
                (name, getattr(values.policy, name)) for name in ("params", "compute", "output")
            )
            model = model.with_overrides(",".join(f"policy.{n}={d.name}" for n, d in pairs))
        return model
    return None


def check_begin_documents(values: flags.FlagValues, problems: Problems) -> None:
    """Adds the problem of `--begin_documents` for data without a document that could begin so.

    The files are looked at only where the flag is given here; a run may be evaluated on others.
    """
    if not (values["begin_documents"].present and values.begin_documents is True):
        return
    with suppress(ValueError):  # what is wrong with --data is a problem already
        if not has_text(values.data, values.data_column):
            problems.add(
                "--begin_documents: token files and chats begin as they are written; leave it out"
            )


def tokenizer_of(
    values: flags.FlagValues, model: Model | None, problems: Problems
) -> Tokenizer | None:
    """Returns the tokenizer of the flags, if the model has all of its tokens."""
    with problems.caught("--tokenizer"):
        tokenizer = load_tokenizer(values.tokenizer, values.end_token)
        vocabulary = getattr(getattr(model, "config", None), "vocab", None)
        if vocabulary is not None:
            check_vocabulary(tokenizer, vocabulary, values.model)
        return tokenizer
    return None


def weights_of(values: flags.FlagValues, problems: Problems) -> Weights | None:
    """Returns the weights of `--init_from`, if that is given."""
    if values.init_from is None:
        return None
    from meshdsl.training.checkpointing.weights import Weights

    with problems.caught("--init_from"):
        return Weights(values.init_from)
    return None


def chat_template(
    values: flags.FlagValues, problems: Problems, today: datetime | None = None
) -> Template | None:
    """Returns the template of chats, if there is one; see `load_template`."""
    from meshdsl.generation.serving.chat import load_template, template_beside

    with problems.caught("--chat_template"):
        path = values.chat_template
        if path is None and isinstance(values.tokenizer, str):
            path = template_beside(values.tokenizer)
        return None if path is None else load_template(path, today)
    return None


def chat_format(values: flags.FlagValues, problems: Problems) -> ChatFormat | None:
    """Returns how chats of `--data` become text; None: there is no template."""
    from meshdsl.generation.serving.chat import identity, template_beside

    template = chat_template(values, problems, DATE)
    if template is None:
        return None
    path = values.chat_template or template_beside(values.tokenizer)
    assert path is not None
    return ChatFormat.of(template, identity(path))


def stop_tokens(
    values: flags.FlagValues, tokenizer: Tokenizer | None, problems: Problems
) -> frozenset[int]:
    """Returns the tokens that end an answer of a chat, beside the tokenizer's own."""
    from meshdsl.generation.serving.chat import stop_tokens_of

    if tokenizer is None or not isinstance(values.tokenizer, str):
        return frozenset()
    with problems.caught("--tokenizer"):
        return stop_tokens_of(tokenizer, values.tokenizer)
    return frozenset()


def begin_token(
    values: flags.FlagValues, tokenizer: Tokenizer | None, stored: StoredParams | None = None
) -> int | None:
    """Returns the token that prompts begin with, by the tokenizer's file; None: no token.

    Args:
        tokenizer: if there is one.
        stored: the parameters of a run, if they are used.
    """
    return tokenizer.begin if tokenizer is not None and reads_begin_tokens(values, stored) else None


def reads_begin_tokens(values: flags.FlagValues, stored: StoredParams | None = None) -> bool:
    """Whether the model has read the tokens that begin texts.

    Weights from elsewhere have; a run says with its checkpoints whether it began with such. One
    that began without them has not, unless `--begin_documents` put the token before its documents.
    """
    from meshdsl.training.checkpointing.saving import ORIGIN

    if stored is not None and ORIGIN in stored.config:
        return True
    if values.begin_documents is True:  # given, or that of the run
        return True
    return values.init_from is not None or is_hugging_face(values.model)


def check_mesh_and_out(values: flags.FlagValues, problems: Problems) -> None:
    """Adds the problems of a layout without a mesh, and of a file `--out` that exists."""
    if values.layout and not values.mesh_shape:
        problems.add(
            '--layout needs a mesh: give --mesh_shape, as in --mesh_shape="data:2,model:4"'
        )
    if values.out and values.out != STDOUT and Path(values.out).exists():
        problems.add(f"--out: {values.out} is there already; choose another name")
