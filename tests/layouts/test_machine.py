"""What differs between the machine of a calibration and another one."""

from dataclasses import replace

from meshdsl.layouts.machine import Machine
from tests.layouts.calibrations import MACHINE


def test_machines_differ_in_what_decides_their_speed():
    assert MACHINE.differences(MACHINE) == []
    assert MACHINE.differences(replace(MACHINE, host="other")) == []
    other = replace(MACHINE, processor="Z80", cores=1, jaxlib="0.1", devices=4)
    assert MACHINE.differences(other) == [
        "devices: 8 there, 4 here",
        "jaxlib: 0.0.1 there, 0.1 here",
        "processor: Fast CPU there, Z80 here",
        "cores: 2 there, 1 here",
    ]
    gpu = replace(MACHINE, platform="gpu", device_kind="NVIDIA H100")
    assert gpu.differences(replace(gpu, processor="Z80", cores=1)) == []
    assert gpu.differences(replace(gpu, device_kind="NVIDIA A100")) == [
        "kind of device: NVIDIA H100 there, NVIDIA A100 here"
    ]
    # Before JAX has looked for devices, they are not known, and no difference.
    assert Machine.here("cpu", "cpu", 8).differences(Machine.here()) == []


def test_this_machine_is_known_without_devices():
    here = Machine.here()
    assert here.cores >= 1 and here.processor and here.jaxlib != "none"
    assert (here.platform, here.device_kind, here.devices) == ("", "", 0)


def test_a_machine_reads_as_its_devices():
    assert str(MACHINE) == "8 cpu devices"
    assert str(replace(MACHINE, devices=1, device_kind="TPU v4")) == "1 TPU v4 device"
