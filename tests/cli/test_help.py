"""The help of a command: which flags it shows, in which order, and that its examples are right."""

import itertools
import re
import shlex

import pytest

from meshdsl.cli import flags, main
from meshdsl.cli.help import GROUPS, HELP, show_help
from meshdsl.cli.parsing.own_texts import OWN
from meshdsl.cli.parsing.table import FLAGS, SEVERAL

# What commands read of flags without the record that they are made of.
READ = re.compile(r'values(?:\.|\[")(\w+)')


def listed(text):
    """Returns the flags of a help text, in order."""
    return re.findall(r"^  --(\w+)", text, re.M)


def test_every_flag_is_in_one_group():
    """A flag that is missing here belongs in a group of meshdsl/cli/help.py."""
    grouped = [*itertools.chain(*GROUPS.values())]
    assert sorted(grouped) == sorted(FLAGS)


def test_every_flag_is_one_of_a_command():
    assert set().union(*(about.flags for about in HELP.values())) == {*FLAGS}


def test_every_command_has_a_help_of_its_own():
    assert [*HELP] == [*main.COMMANDS]


@pytest.mark.parametrize("command", HELP)
def test_a_help_shows_each_flag_once_with_the_most_used_first(command):
    about = HELP[command]
    shown = listed(show_help(command, ""))
    assert len(about.used) <= 10
    assert shown[: len(about.used)] == [*about.used]
    assert sorted(shown) == sorted({*about.flags, "debug", "config", "print_config"})
    assert all(len(line) <= 100 for line in show_help(command, "").split("examples")[0].split("\n"))


@pytest.mark.parametrize("command", HELP)
def test_a_command_shows_the_flags_that_its_module_reads(command):
    module = (main.__file__).replace("main.py", f"{command}.py")
    with open(module) as file:
        read = set(READ.findall(file.read())) & set(FLAGS)
    # They are asked for in order to refuse them.
    refused = {"sweep": {"html", "compare_layout"}, "explore": {"compare_layout", "host"}}.get(
        command, set()
    )
    assert read - refused <= HELP[command].flags


def test_a_text_of_its_own_is_of_a_flag_that_the_command_reads():
    assert [pair for pair in OWN if pair[1] not in HELP[pair[0]].flags] == []
    several = {(command, name) for command, name in OWN if name in SEVERAL.get(command, ())}
    assert all("several: the flag again" in OWN[pair] for pair in several)


@pytest.mark.parametrize("flag", sorted({flag for _, flag in OWN}))
def test_a_flag_with_texts_of_its_own_has_one_for_every_command(flag):
    """So that no command shows what the flag means to others."""
    assert {command for command, name in OWN if name == flag} == {
        command for command, about in HELP.items() if flag in about.flags
    }


@pytest.mark.parametrize(
    ("command", "strange"),
    [
        ("train", "`serve`"),
        ("plot", "`export`"),
        ("runs", "TensorBoard"),
        ("plan", "`compile` to compare"),
        ("generate", "`evaluate`"),
    ],
)
def test_the_help_of_a_command_speaks_of_no_other(command, strange):
    flags_of = show_help(command, "").split("examples")[0]
    assert strange not in " ".join(flags_of.split())


@pytest.mark.parametrize("command", HELP)
def test_the_examples_can_be_read(command):
    for arguments in HELP[command].examples.values():
        words = shlex.split(arguments)
        places = []
        takes = places if command in main.TAKES_WORDS else None
        values, problems = flags.read(words, command, takes)
        assert problems.found == []
        own = [word for word in words if word not in ("--", *places)]
        given = {word.lstrip("-").partition("=")[0] for word in own}
        assert given <= HELP[command].flags and values.is_parsed()


def test_the_help_of_a_command_without_one_has_every_flag():
    assert listed(show_help("new", "Does something new.")) == [*FLAGS]


def test_a_long_text_goes_on_in_its_column(capsys):
    assert main.run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("meshdsl train: Train a language model on text.\n\nmost used\n  --model")
    assert "\n  --initial_loss_scale=4294967296\n                            What the scale" in text
    assert text.rstrip().splitlines()[-1].startswith("    meshdsl train --coordinator=auto")
