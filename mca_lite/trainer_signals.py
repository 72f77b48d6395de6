"""SIGTERM and SIGUSR1, which schedulers send before they take a machine away: finish the step, save, leave.

torchrun passes SIGTERM on to its ranks by itself, SIGUSR1 with --signals-to-handle SIGTERM,SIGINT,SIGUSR1, and kills them
--shutdown-timeout seconds later (30 where it is not set): set that above the time of a step and a checkpoint.
"""

import signal
import threading

EXIT_CODE = (
    85  # of a run that was asked to stop, saved, and can go on with resume_from_checkpoint: auto
)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupted(SystemExit):
    """The run has saved and stops. `signal` is the one that asked for it; the process ends with EXIT_CODE."""

    def __init__(self, number: int, step: int):
        super().__init__(EXIT_CODE)
        self.signal, self.step = signal.Signals(number), step


class StopSignals:
    """While it is entered, SIGTERM and SIGUSR1 are noted in `received` (0: none) instead of ending the process.

    Handlers are a matter of the main thread: in another one nothing is changed."""

    def __init__(self):
        self.received = 0
        self._before = {}

    def _note(self, number, frame) -> None:
        self.received = number

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
