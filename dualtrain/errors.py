"""The kinds of failure that dualtrain raises itself, below everything else so that all rooms can use them."""


class UserError(ValueError):
    """Something that the person who started the program can mend: the message says the fact, the cause and the cure.

    ``shared`` where every rank raises the same one, so that one of them can speak for all.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class BackendError(RuntimeError):
    """A collective operation that did not happen: a mismatch between ranks, a lost rank, a wait that ran out.

    The message names the operation, the rank that reports it and, where it is known, the rank at fault.
    """


class DivergedError(RuntimeError):
    """The loss became infinite or not a number; raised on every rank in the same step, before the weights take it."""


class NotSavedError(RuntimeError):
    """The training ended, and its results could not be written; raised on every rank."""


class StoppedError(RuntimeError):
    """A signal, ``number``, ended the run after everything was saved; raised on every rank after the same step."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
