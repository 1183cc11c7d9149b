"""One process of a job in a cluster: trains a small model and prints its losses as JSON.

`python -m tests.lowering.backends.tf.worker '<options>'` with TF_CONFIG set. Options, as JSON:
mesh, layout, steps; `dies_at`: the step before which the process is killed by itself, and
`hangs_at`: the one before which it stops for ever.
"""

import itertools
import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from meshdsl.lowering.backends import DeviceError
from meshdsl.optim import AdamW
from meshdsl.training import Data, Recipe, Reporting, train
from tests.training import classifier


def batches(options):
    for number, batch in enumerate(classifier.endless(), 1):
        if number == options.get("dies_at"):
            os._exit(9)
        if number == options.get("hangs_at"):
            time.sleep(10_000)
        yield batch


def main():
    options = json.loads(sys.argv[1])
    try:
        result = train(
            Recipe(classifier.init, classifier.loss, AdamW(0.05)),
            Data(batches(options), classifier.BATCH_DIMS),
            steps=options["steps"],
            mesh=options["mesh"],
            layout=options["layout"],
            backend="tf",
            reporting=Reporting(quiet=True),
        )
    except DeviceError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        os._exit(1)  # the others of the cluster are not waited for
    params = [
        value.data.is_fully_addressable
        for value in itertools.chain([result.state.params.w_in, result.state.params.bias])
    ]
    print(json.dumps({"losses": result.losses, "whole": params}), flush=True)


if __name__ == "__main__":
    main()
