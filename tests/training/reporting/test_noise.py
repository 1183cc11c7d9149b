"""Lines of libraries that say nothing: they do not reach the terminal."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest

from meshdsl.training.reporting.noise import has_tpu


def has_plugin():
    """Whether JAX would load the plugin of another device, as that of CUDA."""
    found = importlib.metadata.entry_points(group="jax_plugins")
    return bool(found) or importlib.util.find_spec("jax_plugins") is not None


@pytest.mark.parametrize(
    ("files", "there"),
    [
        ({}, False),
        ({"dev/accel0": ""}, True),
        ({"dev/vfio/0": ""}, True),
        ({"dev/vfio/vfio": ""}, False),
        (
            {"sys/bus/pci/devices/a/vendor": "0x1ae0\n", "sys/bus/pci/devices/a/device": "0x62"},
            True,
        ),
        (
            {"sys/bus/pci/devices/a/vendor": "0x1ae0", "sys/bus/pci/devices/a/device": "0x0042"},
            False,
        ),
        ({"sys/bus/pci/devices/a/vendor": "0x10de\n"}, False),
    ],
)
def test_a_tpu_is_known_by_its_files(tmp_path, files, there):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert has_tpu(str(tmp_path)) is there


@pytest.mark.skipif(has_tpu(), reason="libtpu writes its lines where there is no TPU")
@pytest.mark.skipif(has_plugin(), reason="a plugin of another device writes lines of its own")
def test_libtpu_writes_nothing_where_there_is_no_tpu():
    pytest.importorskip("libtpu")
    free = {
        name: text for name, text in os.environ.items() if not name.startswith(("JAX_", "TPU_"))
    }
    command = [sys.executable, "-m", "meshdsl", "doctor"]
    done = subprocess.run(command, env=free, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "(cpu)" in done.stdout
    assert done.stderr == ""
