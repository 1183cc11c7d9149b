"""Shell completion: scripts that complete the names of commands and flags.

    source <(meshdsl completion bash)

A script has all names in it, so that completing starts no Python. They are those of the commands'
help pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshdsl.cli.help_pages import help_page

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"^  --(\w+)(=(?:true|false)\b)?", re.MULTILINE)
_SWITCHES = ("debug", "print_config")  # flags without a value whose help shows no default

_BASH = """\
# Completion of meshdsl for {shell}: {install}
{before}_meshdsl() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" i
  COMPREPLY=()
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=( $(compgen -W "{commands}" -- "$word") )
    return
  fi
  for (( i = 2; i < COMP_CWORD - 1; i++ )); do  # launch ... -- train
    if [[ "${{COMP_WORDS[i]}}" == "--" ]]; then command="${{COMP_WORDS[i + 1]}}"; fi
  done
  if [[ "$word" != -* ]]; then return; fi  # files
  case "$command" in
{cases}
  esac
}}
complete -o default -o nospace -F _meshdsl meshdsl
"""
_INSTALL = {
    "bash": "source <(meshdsl completion bash), in ~/.bashrc",
    "zsh": "source <(meshdsl completion zsh), in ~/.zshrc",
    "fish": "meshdsl completion fish > ~/.config/fish/completions/meshdsl.fish",
}
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def script(shell: str, commands: Mapping[str, str]) -> str:
    """Returns the script of a shell: `script("bash", {"train": "Train a model."})`.

    Args:
        commands: the names of the commands, with a sentence on each.

    Raises:
        ValueError: it is another shell than those of `SHELLS`.
    """
    if shell not in SHELLS:
        raise ValueError(f"there is completion for {', '.join(SHELLS)}, not for {shell!r}")
    flags = {command: _flags(command) for command in commands}
    if shell == "fish":
        return "\n".join([f"# {_INSTALL[shell]}", *_fish(commands, flags), ""])
    cases = "\n".join(
        f'    {command}) COMPREPLY=( $(compgen -W "{_words(own)}" -- "$word") ) ;;'
        for command, own in flags.items()
    )
    before = _ZSH if shell == "zsh" else ""
    return _BASH.format(
        shell=shell,
        install=_INSTALL[shell],
        before=before,
        commands=" ".join(commands),
        cases=cases,
    )


def flags_of(command: str) -> list[str]:
    """Returns the names of the flags that the help of a command shows, in its order."""
    return [name for name, _ in _flags(command)]


def _flags(command: str) -> list[tuple[str, bool]]:
    """Returns the flags of a command, with whether each takes a value."""
    found = _FLAG.findall(help_page(command) or "")
    return [(name, not switch and name not in _SWITCHES) for name, switch in dict(found).items()]


def _words(flags: Sequence[tuple[str, bool]]) -> str:
    return " ".join(f"--{name}=" if takes_value else f"--{name}" for name, takes_value in flags)


def _fish(
    commands: Mapping[str, str], flags: Mapping[str, Sequence[tuple[str, bool]]]
) -> list[str]:
    lines = []
    for command, about in commands.items():
        text = about.replace("'", "")
        lines.append(f"complete -c meshdsl -n __fish_use_subcommand -a {command} -d '{text}'")
        seen = f"'__fish_seen_subcommand_from {command}'"
        lines += [
            f"complete -c meshdsl -n {seen} -l {name}{' -r' * takes_value}"
            for name, takes_value in flags[command]
        ]
    return lines
