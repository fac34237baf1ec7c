"""The exceptions of the trainer.

::

    TrainerError
    ├── DataError          a dataset cannot be read, or its arrays contradict each other
    ├── PartitionError     a partition folder is missing, damaged or of another version
    ├── SettingsError      an argument is invalid, or arguments contradict each other; also a ValueError
    ├── ServiceError       a graph server failed, refused a request or did not answer in time
    │   ├── ServerGone     a graph server is gone or cannot be reached
    │   └── WireError      bytes are not a message of the graph service
    ├── CheckpointError    a checkpoint does not fit this model or these settings
    └── TrainingError      training cannot continue
        └── PeerError      another rank is missing, failed, or did not answer in time

Every message states what failed, where, and what to do. ``trainer.cli`` prints the message without a traceback and
exits with status 1 (2 for ``SettingsError``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """A wait that has passed its deadline."""

    of: str  #: what was waited for: ``ranks``, ``server`` or ``threads`` (the sampler threads of this process)
    seconds: float
    request: str = ""  #: kind of the request to a graph server
    node_rank: int | None = None  #: of the graph server, if it belongs to this run
    server: str = ""  #: the graph server, if it belongs to a serving cluster: ``node0 (gpu1) of products``
    rank: int | None = None  #: rank that has waited; None: this process


class TrainerError(Exception):
    """Base class of all errors that a user can cause or fix.

    Bugs are not wrapped: they keep their own type and traceback.

    Example:
        ```python
        import gnnfleet as gf

        try:
            graph = gf.open("parts")
        except gf.TrainerError as error:
            print(error)
        ```
    """

    exit_status = 1  #: exit status of ``python -m trainer``
    code = ""  #: ``gnnfleet explain CODE`` explains the error; '' if its message says it all
    follow_up = False  #: another process probably failed before, and caused this error

    def __init__(self, message: object = "", *, wait: Wait | None = None):
        super().__init__(message)
        self.wait = wait  #: the timeout that led to this error, also in another process


class DataError(TrainerError):
    """A dataset cannot be read, or its arrays contradict each other."""


class PartitionError(TrainerError):
    """A partition folder is missing, damaged or of another version, or a graph cannot be partitioned as requested.

    ``gnnfleet partition verify FOLDER`` lists everything that is wrong with a folder.
    """


class SettingsError(TrainerError, ValueError):
    """An argument, option or environment variable is invalid, or arguments contradict each other.

    A subclass of ``ValueError``, since loaders of torch_geometric raise ``ValueError`` for invalid arguments.
    """

    exit_status = 2


class ServiceError(TrainerError):
    """A graph server failed, refused a request, or did not answer before the deadline."""

    follow_up = True


class ServerGone(ServiceError):
    """A graph server is gone or cannot be reached. Another server with the same parts may still answer."""


class WireError(ServiceError):
    """Received bytes are no message of the graph service, or a value cannot be encoded as one."""

    code = "wire-error"


class CheckpointError(TrainerError):
    """A checkpoint cannot be read, or does not fit this model, graph or settings."""


class TrainingError(TrainerError):
    """Training cannot continue, for example because the loss is not finite."""


class PeerError(TrainingError):
    """Another rank is missing, failed, or did not answer before the deadline."""

    code = "lost-rank"
    follow_up = True


def first_wait(errors: Iterable[TrainerError]) -> Wait | None:
    return next((error.wait for error in errors if error.wait), None)
