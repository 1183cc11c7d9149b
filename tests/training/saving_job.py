"""Training runs of the classifier in one of several processes, for `test_saving_in_processes`.

Takes one JSON object: `coordinator`, `count`, `index`, `devices`, and `runs`, each the options of
one. Prints one JSON line for each run: its losses, from which step it went on, and what its final
state is, as checksums of whole arrays.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import jax

from meshdsl.training.checkpointing.weights import load_weights, on_host, save_weights
from meshdsl.training.processes.joining import joined
from meshdsl.training.state import by_path


def main(told):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", told["devices"])
    where = nullcontext()
    if told["count"] > 1:
        where = joined(told["coordinator"], told["count"], told["index"])
    with where:
        for options in told["runs"]:
            print(json.dumps(done(options)), flush=True)


def done(options):
    """Returns what is to be told of one run."""
    from meshdsl.training.checkpointing.saving import Saving
    from tests.training import classifier
    from tests.training.test_resume import run

    options = dict(options)
    workdir, killed_at = options.pop("workdir"), options.pop("killed_at", None)
    once, full_at = options.pop("once", None), options.pop("full_at", None)
    saving, out = options.pop("saving", {}), options.pop("save_weights", None)
    batches = classifier.endless() if killed_at is None else killed(killed_at, Path(once))
    if full_at is not None:
        batches = filling(full_at)
    result = run(
        workdir,
        batches,
        backend="jax",
        saving=None if workdir is None else Saving(**saving),
        log_every=1,
        **options,
    )
    if out is not None:
        save_weights(out, result.state.params)
        with suppress(ValueError):  # in every process
            save_weights(out, result.state.params)
            raise AssertionError("it has been written over")
        assert checksums(load_weights(out, result.state.params)) == checksums(result.state.params)
    return {"losses": result.losses, "step": result.step, "state": checksums(result.state)}


def killed(after, once):
    """Yields batches, and then kills the process, once a file or folder is there."""
    from tests.training import classifier

    for number, batch in enumerate(classifier.endless()):
        if number == after:
            while not once.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def filling(after):
    """Yields batches; after some, no file of this process may grow, as on a full disk."""
    from tests.training import classifier

    for number, batch in enumerate(classifier.endless()):
        if number == after:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        yield batch


def checksums(tree):
    """Returns the checksum of each array of a tree, of which processes hold parts."""
    return {
        name: hashlib.sha256(on_host(array).tobytes()).hexdigest()
        for name, array in by_path(tree).items()
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
