"""The error tree of the trainer.

::

    TrainerError
    ├── DataError          a dataset that cannot be read, or contradicts itself
    ├── PartitionError     a partition folder that is missing, damaged or of another version
    ├── SettingsError      arguments that make no sense together; a ValueError too
    ├── ServiceError       a graph server that failed, refused or did not answer in time
    │   ├── ServerGone     a graph server that is not there any more
    │   └── WireError      bytes that are not a message of the graph service
    ├── CheckpointError    a checkpoint that does not fit this run
    └── TrainingError      training cannot go on
        └── PeerError      another rank is missing, failed, or did not answer in time

Every message says what, where and what to do. ``trainer.cli`` prints it without a traceback
and exits 1 (2 for SettingsError).
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of all errors a user can cause or can act on."""

    exit_status = 1


class DataError(TrainerError):
    """A dataset cannot be read, or its arrays contradict each other."""


class PartitionError(TrainerError):
    """A partition folder is missing, damaged, or of another version."""


class SettingsError(TrainerError, ValueError):
    """Arguments that make no sense together. A ``ValueError`` too, which torch_geometric's loaders raise for such."""

    exit_status = 2


class ServiceError(TrainerError):
    """A graph server failed, refused, or did not answer before its deadline.

    The message names node_rank, endpoint, part ids and cause.
    """


class ServerGone(ServiceError):
    """A graph server is not there any more, or cannot be reached; another holder of its parts may answer."""


class WireError(ServiceError):
    """Bytes that are not a message of the graph service, or a value that cannot be sent."""


class CheckpointError(TrainerError):
    """A checkpoint does not fit this model or config."""


class TrainingError(TrainerError):
    """Training cannot go on, for instance because the loss is no longer a finite number."""


class PeerError(TrainingError):
    """Another rank is missing, failed, or did not answer before its deadline."""
