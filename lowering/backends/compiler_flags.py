"""Compiler flags: the options of XLA beyond its defaults, for each kind of device, by name.

They overlap collectives with computation: collectives are asynchronous, and the scheduler hides
their latency. No flag changes the numbers, or how many bytes are sent. The names come from
`benchmarks/xla_flags_library.py` in MaxText and from OpenXLA's "Flags guidance". A test checks that
libtpu knows the flags of each kind of TPU. Fusions of gathers with products ("continuation fusion")
are for v5e alone: the compiler refuses them for the others. Asynchronous all_to_alls are left out:
the compiler refuses them for v5e.

XLA:CPU drops all barriers before it removes common subexpressions, so that nothing would be
recomputed. Without that pass (`cse_barrier_expander`) it keeps the barriers until it generates
code. It also compiles a small loop to one kernel, which cannot contain barriers: jaxlib 0.10.2 ends
the process. So that pass (`small-while-loop-hoisting`) is off too.

Collective matmul, products decomposed around a collective, has no flag here. XLA decomposes them
while it partitions global tensors. Our programs are partitioned already, and have the option
`overlap` for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from meshdsl.layouts.hardware import hardware_of
from meshdsl.tensors.dims import did_you_mean

Flag = bool | int | float | str
Flags = tuple[tuple[str, Flag], ...]
NONE = "none"
GPUS = ("gpu", "cuda")  # as JAX names their platform

# Only for programs of ours, which join small collectives themselves (`passes.bucket`). XLA would
# join the all_reduces of two halves, which are to travel one after the other (`passes.halves`).
_JOINED: Mapping[str, Flag] = {"xla_jf_crs_combiner_threshold_in_bytes": 0}
_TPU: Mapping[str, Flag] = {
    **_JOINED,
    "xla_enable_async_all_gather": True,
    "xla_enable_async_all_reduce": True,
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_latency_hiding_scheduler": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
_FUSED: Mapping[str, Flag] = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
}
# Collectives of the SparseCores, beside the work of the TensorCore. To hide them, the compiler
# holds more at once: 1.0 to 1.7 times the memory that it needs without them, where there is so
# much. Near the limit of a device it refuses some programs that fit (see `without_offloading`).
_OFFLOADED: Mapping[str, Flag] = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    # Gathers over axes of the mesh that lie along two or three axes of the torus.
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    # Without it, the scheduler lets a collective begin only when the one before it has arrived.
    "xla_tpu_enable_concurrent_sparse_core_offloading": True,
    "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}
_GPU: Mapping[str, Flag] = {"xla_gpu_enable_latency_hiding_scheduler": True}
_CPU_REPLAYS: Mapping[str, Flag] = {
    "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"
}
RECOMMENDED: Mapping[str, Mapping[str, Flag]] = MappingProxyType(
    {
        **dict.fromkeys(("v3", "v4"), _TPU),
        **{key: {**_TPU, **_OFFLOADED} for key in ("v5p", "v6e")},
        "v5e": {**_TPU, **_FUSED},
        **dict.fromkeys(("a100", "h100", "h200", "b200"), _GPU),
    }
)


def recommended(device_kind: str, platform: str, replays: bool = False) -> Mapping[str, Flag]:
    """Returns the flags for a device, by JAX's name of it: `recommended("TPU v5 lite", "tpu")`.

    Args:
        replays: whether the program recomputes values, behind barriers (`md.checkpoint`).
    """
    if platform == "cpu" and replays:
        return _CPU_REPLAYS
    if platform in GPUS:
        return _GPU
    known = hardware_of(device_kind)
    return RECOMMENDED.get(known.name, {}) if known is not None else {}


def of_any_program(flags: Mapping[str, Flag]) -> Mapping[str, Flag]:
    """Returns flags without those that suit only programs which join collectives themselves."""
    return {name: value for name, value in flags.items() if name not in _JOINED}


def without_offloading(flags: Mapping[str, Flag], given: Flags = ()) -> dict[str, Flag] | None:
    """Returns flags with which collectives hold no memory beside the work, and are not hidden.

    None: there is no such flag to leave out.

    Args:
        given: those that a user gave, which stay.
    """
    dropped = _OFFLOADED.keys() - dict(given).keys()
    left = {name: value for name, value in flags.items() if name not in dropped}
    return left if len(left) < len(flags) else None


def parse(text: str) -> Flags:
    """Returns the flags of a text `name=value,...`.

    They are added to the recommended flags. If `none` comes first, they replace them; it is kept
    as the first name. A value is true, false, a number or a word.

    Raises:
        ValueError: a part has no value, or a flag is given twice.
    """
    flags: dict[str, Flag] = {}
    for part in filter(None, re.split(r"[,;\s]+", text)):
        name, equals, value = part.removeprefix("--").partition("=")
        if name == NONE and not equals and not flags:
            flags[NONE] = True
            continue
        if not (name and equals and value):
            raise ValueError(
                f"needs name=value pairs, as in xla_tpu_enable_latency_hiding_scheduler=false, or "
                f"{NONE} first to leave out those recommended; got {part!r}"
            )
        if name in flags:
            raise ValueError(f"{name} is given twice")
        flags[name] = _value(value)
    return tuple(flags.items())


def chosen(flags: Flags, default: Mapping[str, Flag]) -> dict[str, Flag]:
    """Returns a user's flags merged into the recommended ones, or alone after `none`."""
    given = dict(flags)
    return given if given.pop(NONE, False) else {**default, **given}


def show(flags: Mapping[str, Flag]) -> list[str]:
    """Returns flags as text: `xla_enable_async_all_gather=true`."""
    return [f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in flags.items()]


def unknown(error: Exception, flags: Mapping[str, Flag]) -> str:
    """Returns the message for a compiler's error that is about a flag, else an empty text."""
    match = re.search(r"No such compile option: '([^']*)'|into flag (\w+)", str(error))
    if match is None:
        return ""
    if match.group(1) is None:
        name = match.group(2)
        value = show({name: flags.get(name, "")})[0].partition("=")[2]
        return f"compiler flag {name} cannot be {value!r}"
    name = match.group(1)
    known = {n for table in RECOMMENDED.values() for n in table} - {name}
    return f"the compiler knows no flag {name!r}{did_you_mean(name, known)}"


def _value(text: str) -> Flag:
    """Returns the value of a text: a bool, an int, a float, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
