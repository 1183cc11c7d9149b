"""Reading a command line, the same for every command, so that commands can be swapped.

Each flag has a reader (see `parsing.table`). One error lists all values that readers refuse and all
flags that do not exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags

from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.parsing import configuration
from meshdsl.cli.parsing.readers import Reader, truth
from meshdsl.cli.parsing.table import ABOUT, FLAGS, SEARCHING, SEVERAL
from meshdsl.layouts.automatic import is_auto
from meshdsl.tensors.dims import did_you_mean

_LISTED = frozenset(itertools.chain(*SEVERAL.values()))
_SEARCHED = [FLAGS[name][1] for name in ("mesh_shape", "layout", "microbatches")]


@dataclass(frozen=True)
class Mistake:
    """Stands for the value of a flag whose text could not be read."""

    reason: str


def read(
    arguments: Sequence[str], command: str = "train", words: list[str] | None = None
) -> tuple[flags.FlagValues, Problems]:
    """Reads the arguments of a command, and those of the file of `--config`, if it is given.

    Args:
        words: gets the arguments that are no flags, and all after `--`; None: they are mistakes.

    Returns:
        The values, and the problems. A value that could not be read is a `Mistake`.
    """
    problems = Problems()
    after: Sequence[str] = ()
    if words is not None and "--" in arguments:
        end = arguments.index("--")
        arguments, after = arguments[:end], arguments[end + 1 :]
    values, rest = _parsed(arguments, command, problems)
    places: Mapping[str, str] = {}
    if values.config is not None and not problems.found:
        several = [name for name, takes in SEVERAL.items() if name == command for name in takes]
        given = [name for name in FLAGS if values[name].present]
        with problems.caught("--config"):
            settings = configuration.read(values.config, FLAGS, several, given)
            problems.found += settings.problems
            places = settings.places
            values, rest = _parsed([*settings.arguments, *arguments], command, problems)
    for argument in rest:
        if words is None or argument.startswith("-"):
            problems.add(_unknown(argument, values))
        else:
            words.append(argument)
    if words is not None:
        words += after
    for name in FLAGS:
        value = getattr(values, name)
        if isinstance(value, Mistake):
            place = f" ({places[name]})" if name in places else ""
            problems.add(f"--{name}{place}: {value.reason}")
        elif is_auto(value) and command not in SEARCHING and FLAGS[name][1] in _SEARCHED:
            problems.add(
                f"--{name}=auto is for {', '.join(SEARCHING)}; `meshdsl plan` shows what it "
                "stands for"
            )
        elif not isinstance(value, list) and name in _LISTED and values[name].present > 1:
            problems.add(
                f"--{name} is given {values[name].present} times: only `{_takes_several(name)}` "
                "takes several"
            )
    return values, problems


def _parsed(
    arguments: Sequence[str], command: str, problems: Problems
) -> tuple[flags.FlagValues, list[str]]:
    """Returns the values of arguments, and those that are no flags; adds to the problems."""
    values = flags.FlagValues()
    for name, (default, reader, text) in FLAGS.items():
        if name in SEVERAL.get(command, ()):
            plain: flags.ArgumentSerializer[str] = flags.ArgumentSerializer()
            flags.DEFINE_multi(_Parser(str), plain, name, default, text, values)
            continue
        flags.DEFINE_flag(_Flag(_Parser(reader), None, name, default, text), values)
        values[name].boolean = reader is truth  # `--overlap` alone says yes, `--nooverlap` no
    flags.DEFINE_bool("help", False, ABOUT["help"], values, short_name="h")
    flags.DEFINE_bool("debug", False, ABOUT["debug"], values)
    flags.DEFINE_string("config", None, ABOUT["config"], values)
    flags.DEFINE_bool("print_config", False, ABOUT["print_config"], values)
    try:
        return values, values(["meshdsl", *arguments], known_only=True)[1:]
    except flags.Error as error:
        problems.add(str(error))
        values.mark_as_parsed()
        return values, []


def _takes_several(name: str) -> str:
    return next(command for command, names in SEVERAL.items() if name in names)


def as_configuration(values: flags.FlagValues, command: str, names: Collection[str]) -> str:
    """Returns the flags that are set as a configuration file, and the command's others."""
    texts = {}
    for name in FLAGS:
        flag = values[name]
        if flag.present:
            texts[name] = [flag.text] if isinstance(flag, _Flag) else list(flag.value or ())
    # --hardware has a default for reports, but decides more where it is given.
    others = {n: FLAGS[n][0] for n in FLAGS if n in names and n not in texts and n != "hardware"}
    return configuration.shown(command, texts, others)


def written(values: flags.FlagValues) -> list[str]:
    """Returns the flags that the user set, as arguments; flags of lists are left out."""
    present = [values[name] for name in FLAGS if values[name].present]
    return [f"--{flag.name}={flag.text}" for flag in present if isinstance(flag, _Flag)]


class _Parser(flags.ArgumentParser):
    """A reader as absl wants it; a refused text becomes a `Mistake` rather than an error."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def parse(self, argument: str) -> Any:
        try:
            return self._reader(argument)
        except ValueError as error:
            return Mistake(str(error))


class _Flag(flags.Flag):
    """A flag that keeps the last text it was set to."""

    text = ""

    def parse(self, argument: Any) -> None:
        self.text = argument
        super().parse(argument)


def _unknown(argument: str, values: flags.FlagValues) -> str:
    if not argument.startswith("-"):
        return f"{argument!r} is not a flag; flags are written --name=value"
    name = argument.lstrip("-").partition("=")[0]
    return f"unknown flag --{name}{_with_dashes(did_you_mean(name, FLAGS))}"


def _with_dashes(hint: str) -> str:
    return hint.replace(" `", " `--")
