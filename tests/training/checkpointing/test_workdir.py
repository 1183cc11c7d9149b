"""One run at a time has a workdir, where the disk can tell."""

import errno
import fcntl
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.checkpointing.saving import Saving, differences
from meshdsl.training.checkpointing.workdir import locked, locked_copies

# Has the system refuse flock (73 on x86-64) with an error, as a disk without locks does.
REFUSING = """
import ctypes, struct, sys, warnings
from meshdsl.training.checkpointing.workdir import locked

steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 73), (0x06, 0, 0, 0x50000 + int(sys.argv[2]))]
code = b"".join(struct.pack("HBBI", *step) for step in [*steps, (0x06, 0, 0, 0x7FFF0000)])
program = ctypes.create_string_buffer(code)
filtered = struct.pack("HxxxxxxP", 4, ctypes.addressof(program))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filtered, 0, 0):
    sys.exit(77)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with locked(sys.argv[1]) as folder:
        (folder / "file").write_text("")
print(*(warning.message for warning in told))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of flock is x86-64's")
@pytest.mark.parametrize("code", [37, 38])  # ENOLCK, ENOSYS
def test_a_disk_without_locks_is_told_and_the_run_goes_on(code, tmp_path):
    command = [sys.executable, "-c", REFUSING, str(tmp_path / "run"), str(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip("the system lets no process filter its calls")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"workdir {tmp_path}/run cannot be locked ({os.strerror(code)}): see to it that no other "
        "run uses it\n"
    )
    assert (tmp_path / "run" / "file").exists()


def test_a_disk_without_any_room_is_one_line(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    message = re.escape(f"cannot write to {tmp_path}: {os.strerror(errno.EFBIG)}. Choose another")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        with pytest.raises(ValueError, match=message), locked(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    with locked(tmp_path):
        pass


def test_a_workdir_that_another_run_has_is_told_with_its_process(tmp_path):
    with locked(tmp_path):
        told = re.escape(f"workdir {tmp_path} is in use by process {os.getpid()} on ")
        with pytest.raises(ValueError, match=told), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_settings_are_compared_as_json_stores_them():
    saved = {"widths": [64, 128], "by": {"1": 2}}
    assert differences(saved, {"widths": (64, 128), "by": {1: 2}}, {}) == []
    assert differences(saved, {"widths": (64, 12), "by": {1: 2}}, {}) == [
        "widths: [64, 128] in the checkpoint, [64, 12] here"
    ]
    assert differences({}, {}, {"widths": (1, 2)}) == []
    assert differences({"widths": [1, 2]}, {}, {"widths": (1, 2)}) == []
    with pytest.raises(ValueError, match="defaults must be what JSON can write"):
        Saving(defaults={"dtype": object()})
    with pytest.raises(ValueError, match="config and defaults must be what JSON can write"):
        Saving(config={"dtype": object()})


def test_two_supervisors_of_one_machine_do_not_share_copies(tmp_path):
    """Each would take those of the other for its own, and delete them."""
    folder = tmp_path / "long" / "copies"
    message = f"another supervisor keeps copies in {folder}, on this machine or on a disk that"
    with locked_copies(None), locked_copies(folder):
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(message)), locked_copies(folder):
                pass
            # A run that ends deletes its copies, and the folder if nothing else is in it.
            with Checkpoints(tmp_path / "kept", host_copies=folder):
                pass
    assert not folder.exists()


def test_a_folder_of_copies_is_locked_while_its_last_owner_deletes_it(tmp_path, monkeypatch):
    """What is locked has to be the file that others find there."""
    folder, flock, deleted = tmp_path / "copies", fcntl.flock, []

    def locks(*given):
        if not deleted:
            deleted.append(shutil.rmtree(folder))
        return flock(*given)

    monkeypatch.setattr(fcntl, "flock", locks)
    with locked_copies(folder):
        assert deleted == [None]
        with pytest.raises(ValueError, match="another supervisor"), locked_copies(folder):
            pass
    assert not folder.exists()


def test_a_folder_of_copies_stays_as_long_as_anything_is_in_it(tmp_path):
    folder = tmp_path / "copies"
    with locked_copies(folder):
        (folder / "process.0").mkdir()
    assert (folder / "process.0").is_dir()
    (folder / "file").touch()
    with pytest.raises(ValueError, match="cannot be created: "), locked_copies(folder / "file"):
        pass
