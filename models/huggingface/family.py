"""Family: what is to be known of the models that share a `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshdsl.models.huggingface.placing import Part, Table
from meshdsl.models.huggingface.settings import Settings
from meshdsl.models.model import Model
from meshdsl.tensors.named_array import Spec


@dataclass(frozen=True)
class Family:
    """How the models of a `model_type` are configured, and where their parameters are.

    Attributes:
        name: the `model_type`.
        architecture: the class of `transformers` that an exported folder names.
        configure: settings -> the configuration of a model; adds problems to the settings.
        describe: a configuration -> settings and problems: what of it the family cannot have.
        parts: of each parameter, by its path: the tensor that has it.
        make: name, configuration, batch size, length -> the model.
        prefix: begins the names of tensors, but for folders of the model without its head.
        unused: patterns of tensors that are no parameters, such as tables of positions.
        tied: tensors that repeat the embedding in some folders.
        renamed: pairs of endings: what very old files call a tensor, and what others call it.
        beyond: the contents of `config.json` -> further such patterns as `unused`.
        more: a configuration -> parts that depend on it, besides `parts`.
    """

    name: str
    architecture: str
    configure: Callable[[Settings], Any]
    describe: Callable[[Any], tuple[dict[str, Any], list[str]]]
    parts: Mapping[str, Part]
    make: Callable[[str, Any, int, int], Model]
    prefix: str = ""
    unused: Sequence[str] = ()
    tied: Sequence[str] = ()
    renamed: Sequence[tuple[str, str]] = ()
    beyond: Callable[[Mapping[str, Any]], Sequence[str]] | None = None
    more: Callable[[Any], Mapping[str, Part]] | None = None

    def ignores(self, settings: Mapping[str, Any]) -> Sequence[str]:
        """Returns patterns of the tensors of a folder that are no parameters of its model."""
        beyond = () if self.beyond is None else self.beyond(settings)
        return (*self.unused, *self.tied, *beyond)

    def table(self, config: Any, specs: Mapping[str, Spec]) -> Table:
        """Returns the table of a model's parameters, by their dims."""
        more = {} if self.more is None else self.more(config)
        return Table({**self.parts, **more}, specs)
