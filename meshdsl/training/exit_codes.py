"""The exit codes of `meshdsl train`: what ended a run, for those that start it again or do not.

`NOTICE` is the signal after which a run saves its state and ends, to be started again.

Guarantees:
    A run that ends with one of `FINAL` would end alike if the same command were given again, is
    done, or was told to end. Any other code, or a signal, may come from a fault of a machine.
"""

import signal

NOTICE: int | None = getattr(signal, "SIGUSR1", None)  # which Windows lacks

DONE = 0
FAILED = 1  # a device, a process or another machine has failed
MISTAKE = 2  # of the user, in flags, files or data
NOT_FINITE = 65  # a loss or a gradient was not finite (EX_DATAERR of sysexits.h)
DIFFERING = 70  # devices hold different replicas of the state (EX_SOFTWARE)
UNFINISHED = 75  # the time of the run is over, and it is to be started again (EX_TEMPFAIL)
INTERRUPTED = 130  # as shells count a process ended by SIGINT
TERMINATED = 143  # as shells count a process ended by SIGTERM

FINAL = (DONE, MISTAKE, NOT_FINITE, DIFFERING, UNFINISHED, INTERRUPTED, TERMINATED)
