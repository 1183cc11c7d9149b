"""Noise of libraries: lines on the terminal that say nothing which a user needs.

Where there is no TPU, libtpu writes several lines of errors when JAX looks for one. So JAX does not
look where none can be. Nothing is hidden: if a TPU may be there, or another plugin of JAX is
installed, or `JAX_PLATFORMS` is set, JAX looks as always.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

_GOOGLE = "0x1ae0"  # the vendor of TPUs on the PCI bus
_OF_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}  # JAX sets them itself
_NETWORK = "0x0042"  # the network card of Google's virtual machines, of the same vendor


def look_for_no_absent_tpu() -> None:
    """Has JAX use CPUs where nothing else can be found; JAX must not be in use yet."""
    if find_spec("libtpu") is None or _other_plugins() or _asked(os.environ) or has_tpu():
        return
    import jax

    if jax.config.values["jax_platforms"] is None:
        jax.config.update("jax_platforms", "cpu")


def has_tpu(root: str = "/") -> bool:
    """Whether a machine may have a TPU, by its files of devices.

    Args:
        root: the folder of `dev` and `sys`.
    """
    devices = Path(root) / "dev"
    if any(devices.glob("accel*")) or any(devices.glob("vfio/[0-9]*")):
        return True
    cards = (Path(root) / "sys" / "bus" / "pci" / "devices").glob("*")
    return any(_read(c / "vendor") == _GOOGLE and _read(c / "device") != _NETWORK for c in cards)


def _asked(environment: Mapping[str, str]) -> bool:
    """Whether the user says where JAX is to look."""
    names = set(environment) - _OF_JAX
    return any(name.startswith(("JAX_PLATFORM", "TPU_", "PJRT_")) for name in names)


def _other_plugins() -> bool:
    return find_spec("jax_plugins") is not None or bool(entry_points(group="jax_plugins"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
