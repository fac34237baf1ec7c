"""Former names of what is now in ``trainer.ranks``, until the last files that import them have moved."""

from trainer.ranks import RankGroup as Team
from trainer.ranks import pick_device

__all__ = ["Team", "pick_device"]
