"""Commands that reports print, to be copied: each is one that its command accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from absl import flags

from meshdsl.cli import flags as all_flags
from meshdsl.layouts.automatic import AUTO, is_auto
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology

_SPECIAL = re.compile(r'["$`\\!]')  # what shells read inside of double quotes
# Of a report, of devices that `plan` does not use, or written anew.
_ASIDE = frozenset("html json host_devices layout hardware topology slices".split())


def search_command(values: flags.FlagValues) -> str:
    """Returns the `meshdsl plan` that looks for a layout of a step that does not fit.

    The machine is the topology; without one, or if the mesh is not one of it, as many devices of
    `--hardware` as the mesh has.

    Args:
        values: the flags of `explain`.

    Returns:
        The command; an empty string without a mesh and a topology.
    """
    machine = _machine(values)
    if not machine:
        return ""
    given = [text for text in all_flags.written(values) if _name(text) not in _ASIDE]
    layout = str(values.layout or "")
    if not is_auto(values.layout):
        layout = "; ".join(filter(None, [layout, AUTO]))
    return typed(["meshdsl", "plan", *given, *machine, f"--layout={layout}"])


def typed(arguments: Iterable[str]) -> str:
    """Returns arguments as the pages type them: `--layout="batch:data; auto"`."""
    return " ".join(map(_quoted, arguments))


def _quoted(argument: str) -> str:
    flag, sign, value = argument.partition("=")
    plain = shlex.quote(argument) == argument
    if plain or not re.fullmatch(r"--\w+", flag) or _SPECIAL.search(value):
        return shlex.quote(argument)
    return f'{flag}{sign}"{value}"'


def _machine(values: flags.FlagValues) -> list[str]:
    """Returns the flags of the machine, of which `plan` refuses some together."""
    mesh = values.mesh_shape
    if values.topology and _has(values, mesh):
        slices = [f"--slices={values.slices}"] if values["slices"].present else []
        return [f"--topology={values.topology}", *slices]
    return [f"--hardware={values.hardware}"] if isinstance(mesh, Mesh) else []


def _has(values: flags.FlagValues, mesh: Mesh | None) -> bool:
    """Whether there is a topology as it is given, with such a mesh."""
    try:
        topology = Topology.parse(values.topology, values.slices)
    except ValueError:
        return False
    return not isinstance(mesh, Mesh) or not topology.problems(mesh)


def _name(argument: str) -> str:
    return argument.lstrip("-").partition("=")[0]
