"""Shells complete the names of commands and flags."""

import shutil
import subprocess

import pytest

from meshdsl.cli import main
from meshdsl.cli.help import HELP
from meshdsl.cli.help_pages.completion import SHELLS, flags_of, script


def completed(*words, shell="bash"):
    """Returns what a shell offers for the last of some words."""
    before = script(shell, main.COMMANDS)
    given = " ".join(f"'{word}'" for word in words)
    asks = f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _meshdsl; "
    asks += "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "-uc", f"{before}\n{asks}"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("meshdsl", "exp"), ["explain", "explore", "export"]),
        (("meshdsl", "zz"), []),
        (("meshdsl", "train", "--mesh"), ["--mesh_shape="]),
        (("meshdsl", "launch", "--max_r"), ["--max_restarts="]),
        (("meshdsl", "launch", "--processes=2", "--", "train", "--mesh"), ["--mesh_shape="]),
        (("meshdsl", "train", "--model=gpt_mini", "runs"), []),  # files, which bash completes
        (("meshdsl", "train", "--resu"), ["--resume"]),
        (("meshdsl", "train", "--debu"), ["--debug"]),
        (("meshdsl", "nothing", "--a"), []),
    ],
)
def test_bash_offers_what_fits(words, expected):
    assert completed(*words) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_offers_all_commands():
    assert completed("meshdsl", "") == [*main.COMMANDS]


@pytest.mark.parametrize("command", main.COMMANDS)
def test_all_flags_of_a_commands_help_are_offered(command):
    assert {*HELP[command].flags} <= {*flags_of(command)}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_line_prints_the_script(shell, capsys):
    assert main.run(["completion", shell]) == 0
    assert capsys.readouterr().out.rstrip() == script(shell, main.COMMANDS).rstrip()


def test_the_script_of_zsh_is_that_of_bash_with_its_own_start():
    lines = script("zsh", main.COMMANDS).splitlines()
    assert lines[1:3] == [
        "autoload -U +X compinit && compinit",
        "autoload -U +X bashcompinit && bashcompinit",
    ]
    assert lines[3:] == script("bash", main.COMMANDS).splitlines()[1:]


def test_fish_has_each_command_and_flag():
    text = script("fish", main.COMMANDS)
    assert "-a runs -d 'List runs" in text
    assert "-n '__fish_seen_subcommand_from train' -l mesh_shape -r" in text


@pytest.mark.parametrize("words", [[], ["csh"]])
def test_another_shell_is_a_mistake(words, capsys):
    assert main.run(["completion", *words]) == 2
    assert "there is completion for bash, zsh, fish, not for" in capsys.readouterr().err
