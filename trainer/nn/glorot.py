"""How weights begin."""

from __future__ import annotations

import math

from torch import Tensor


def glorot(weight: Tensor) -> None:
    """Draw ``weight`` [.., rows, columns] in place, with the same numbers as torch_geometric's function of that name,
    which takes seconds to import."""
    bound = math.sqrt(6.0 / (weight.size(-2) + weight.size(-1)))
    weight.data.uniform_(-bound, bound)
