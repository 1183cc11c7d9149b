"""The TensorFlow backend: one program for all replicas, with TensorFlow's own collectives.

It runs on the TPU named by `--tpu` or TPU_NAME. Without a name it runs on host devices, those of
one process or of the processes in TF_CONFIG.
"""

from meshdsl.lowering.backends.tf.require import tensorflow as _tensorflow

_tensorflow()

from meshdsl.lowering.backends.tf import runtime  # noqa: E402
from meshdsl.lowering.backends.tf.emitters import EMITTERS  # noqa: E402
from meshdsl.lowering.backends.tf.targets import Executable  # noqa: E402

__all__ = ["EMITTERS", "Executable", "runtime"]
