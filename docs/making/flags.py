"""The page of all flags, made of the code: by group, with their defaults and commands."""

from __future__ import annotations

import html

from meshdsl.cli.help import GROUPS, HELP
from meshdsl.cli.main import COMMANDS
from meshdsl.cli.parsing.table import FLAGS


def text() -> str:
    """Returns the page as Markdown."""
    lines = ["# Commands and flags", "", "Every command takes every flag, so that `train` and"]
    lines += ["`explain` can be swapped; the tables say which command reads it.", ""]
    lines += ["| command | does |", "|---|---|"]
    lines += [f"| `meshdsl {name}` | {says} |" for name, says in COMMANDS.items()]
    lines += ["", "Of a flag that is true or false, `--overlap` says yes and `--nooverlap` no."]
    lines += ["`--debug` shows where in the code an error comes from, `--help` the flags of a"]
    lines += ["command. [`--config`](../guides/train.md#flags-in-a-file) reads flags of a file."]
    lines += [""]
    for title, names in GROUPS.items():
        lines += [f"## {title.capitalize()}", "", "| flag | default | meaning | read by |"]
        lines += ["|---|---|---|---|", *map(_row, names), ""]
    return "\n".join(lines) + "\n"


def _row(name: str) -> str:
    default, _, says = FLAGS[name]
    shown = f"`{default}`" if default else ""
    read_by = ", ".join(command for command, about in HELP.items() if name in about.flags)
    anchor = f'<span id="{name}"></span>`--{name}`'
    return f"| {anchor} | {shown} | {_escaped(says)} | {read_by} |"


def _escaped(says: str) -> str:
    """Returns a help text as the cell of a table: what it quotes in backticks is code already."""
    parts = says.split("`")
    plain = [html.escape(part, quote=False) for part in parts[::2]]
    for sign in "|*_":
        plain = [part.replace(sign, f"&#{ord(sign)};") for part in plain]
    parts[::2] = plain
    return "`".join(parts)
