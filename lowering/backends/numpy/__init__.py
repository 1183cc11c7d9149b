"""The numpy backend: simulates all devices in lockstep; the reference for the others."""

from meshdsl.lowering.backends.numpy import runtime
from meshdsl.lowering.backends.numpy.emitters import EMITTERS
from meshdsl.lowering.backends.numpy.executable import Executable

__all__ = ["EMITTERS", "Executable", "runtime"]
