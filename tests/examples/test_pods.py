"""The scripts for pods: flags that exist, meshes of their machines, steps that fit."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from meshdsl.cli import flags, main

PODS = Path(__file__).resolve().parents[2] / "examples" / "pods"
SCRIPTS = ["slurm.sbatch", "tpu_vm.sh"]
# Of https://slurm.schedmd.com/sbatch.html.
SBATCH = "cpus-per-task gpus-per-node job-name nodes ntasks-per-node open-mode output"
SBATCH += " requeue signal time"
# Flags of `train` that `explain` has no use for.
ASIDE = "checkpoint_every coordinator data data_cache grace join_timeout tokenizer workdir"


def text_of(name):
    return (PODS / name).read_text()


def manifest():
    """Returns the JobSet, and the specification of its pods."""
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load(text_of("gke.yaml"))
    return jobset, jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def arguments_of(name):
    """Returns the arguments that a file gives to `meshdsl train`."""
    if name == "gke.yaml":
        (container,) = manifest()[1]["template"]["spec"]["containers"]
        assert container["command"] == ["meshdsl", "train"]
        return container["args"]
    (command,) = re.findall(r"meshdsl train ((?:.*\\\n)+.*)", text_of(name))
    return [word.rstrip("'") for word in shlex.split(command.removesuffix("'").replace("\\\n", ""))]


def values_of(name):
    """Returns the values of the flags by name; none of them may be unknown or unreadable."""
    values, problems = flags.read(arguments_of(name), "train")
    assert problems.found == []
    return values


@pytest.mark.parametrize("name", [*SCRIPTS, "gke.yaml"])
def test_the_command_is_one_that_meshdsl_takes(name):
    values = values_of(name)
    assert values.coordinator == "auto" and values.workdir.startswith("/shared/")


def test_the_mesh_of_slurm_has_a_device_for_each_gpu():
    given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", text_of("slurm.sbatch"), re.M))
    assert set(given) <= set(SBATCH.split())
    assert given["ntasks-per-node"] == given["gpus-per-node"]
    devices = int(given["nodes"]) * int(given["gpus-per-node"])
    values = values_of("slurm.sbatch")
    assert values.mesh_shape.size == devices
    assert values.grace < int(given["signal"].partition("@")[2])


def test_the_mesh_of_gke_has_a_device_for_each_chip():
    _, job = manifest()
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    sizes = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = container["resources"]["limits"]["google.com/tpu"] * job["parallelism"]
    values = values_of("gke.yaml")
    assert values.mesh_shape.size == chips == math.prod(map(int, sizes))
    assert job["parallelism"] == job["completions"]
    assert values.grace < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_mesh_of_the_tpu_vm_has_a_device_for_each_chip():
    text = text_of("tpu_vm.sh")
    (cores,) = re.findall(r"--accelerator-type=v5p-(\d+)", text)
    assert values_of("tpu_vm.sh").mesh_shape.size == int(cores) / 2
    assert text.count("--worker=all") == 2  # once to copy, once in the function that runs a command


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_one_that_bash_reads(name):
    done = subprocess.run(["bash", "-n", str(PODS / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("name", "hardware"), [("slurm.sbatch", "h100"), ("gke.yaml", "v5p")])
def test_the_step_fits_the_machine(name, hardware, capsys):
    given = [a for a in arguments_of(name) if a.partition("=")[0][2:] not in ASIDE.split()]
    assert main.run(["explain", *given, f"--hardware={hardware}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
