"""Decoders of knowledge graphs: scores of links of several relations, from the rows of their ends.

Each has a vector per relation, and turns the row of one end into a *query*, which is compared with the rows of all
candidates for the other end: by dot products or by distances. So one matrix product scores many candidates. A relation
r of R is asked for the targets of a source; ``R + r`` is the same relation, with the same weights, asked for the
sources of a target.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RelationDecoder(nn.Module):
    """Base of decoders with weights per relation.

    Attributes:
        relation: [num_relations, width], the weights.
        margin: Score of equal rows, if scores are distances.
    """

    distance = False  #: a score is ``margin`` minus the distance of query and row, not their dot product

    def __init__(self, relation: Tensor, margin: float = 0.0):
        super().__init__()
        self.relation, self.margin = nn.Parameter(relation), margin

    def query(self, rows: Tensor, relation: Tensor) -> Tensor:
        """Return the query of each row, [n, dim]. ``relation``: int64 [n], from 0 to twice the number of relations."""
        count = len(self.relation)
        sign = torch.where(relation < count, 1, -1).to(rows.dtype)
        return self._query(rows, self.relation[relation % count], sign[:, None])

    def _query(self, rows: Tensor, weights: Tensor, sign: Tensor) -> Tensor:
        """Return the queries of rows for relations with these weights; ``sign`` is -1 if sources are asked for."""
        raise NotImplementedError

    def pair_scores(self, query: Tensor, rows: Tensor) -> Tensor:
        """Return the score of each query with its row: [n]. Leading dimensions broadcast."""
        if self.distance:
            return self.margin - torch.linalg.vector_norm(query - rows, dim=-1)
        return (query * rows).sum(-1)

    def all_scores(self, query: Tensor, rows: Tensor) -> Tensor:
        """Return the scores of all queries with all rows, [n, m]."""
        products = query @ rows.t()
        if not self.distance:
            return products
        square = query.square().sum(1, keepdim=True) + rows.square().sum(1) - 2 * products
        return self.margin - square.clamp(min=1e-12).sqrt()

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        """Return the scores of pairs, see ``Decoder``. Without ``relation``, all pairs are of relation 0."""
        number = torch.as_tensor(0 if relation is None else relation, device=h_src.device)
        if number.dim() and h_src.dim() > 2:  # one relation per row of candidates
            number = number.view(len(number), *[1] * (h_src.dim() - 2)).expand(h_src.shape[:-1])
        flat = h_src.reshape(-1, h_src.shape[-1])
        query = self.query(flat, number.expand(h_src.shape[:-1]).reshape(-1)).view_as(h_src)
        return self.pair_scores(query, h_dst)


class DistMult(RelationDecoder):
    """Score a pair by ``sum of h_src * r * h_dst`` with a learnt row r per relation.

    Yang et al., "Embedding Entities and Relations for Learning and Inference in Knowledge Bases" (2015).

    Args:
        num_relations: Number of relations.
        dim: Width of the rows.

    Shapes:
        - **input:** rows [n, dim] and [n, dim], leading dimensions broadcast; relation int64 [n] or one number.
        - **output:** scores [n].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        decoder = gf.nn.DistMult(num_relations=3, dim=32)
        relation = torch.randint(3, (8,))
        scores = decoder.score(torch.randn(8, 32), torch.randn(8, 32), relation)  # [8]
        ```
    """

    def __init__(self, num_relations: int, dim: int):
        super().__init__(nn.init.xavier_uniform_(torch.empty(num_relations, dim)))

    def _query(self, rows: Tensor, weights: Tensor, sign: Tensor) -> Tensor:
        return rows * weights


class ComplEx(RelationDecoder):
    """Score a pair by the real part of ``sum of h_src * r * conj(h_dst)``. Rows are complex, the real parts first.

    Trouillon et al., "Complex Embeddings for Simple Link Prediction" (2016).

    Args:
        num_relations: Number of relations.
        dim: Width of the rows, even.

    Shapes:
        - **input:** rows [n, dim] and [n, dim], leading dimensions broadcast; relation int64 [n] or one number.
        - **output:** scores [n].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        decoder = gf.nn.ComplEx(num_relations=3, dim=32)
        scores = decoder.score(torch.randn(8, 32), torch.randn(8, 32), torch.randint(3, (8,)))  # [8]
        ```
    """

    def __init__(self, num_relations: int, dim: int):
        super().__init__(nn.init.xavier_uniform_(torch.empty(num_relations, dim)))

    def _query(self, rows: Tensor, weights: Tensor, sign: Tensor) -> Tensor:
        re, im = weights.chunk(2, 1)
        return _times(rows, re, im * sign)


class TransE(RelationDecoder):
    """Score a pair by ``margin - |h_src + r - h_dst|``, with Euclidean distances.

    Bordes et al., "Translating Embeddings for Modeling Multi-Relational Data" (2013).

    Args:
        num_relations: Number of relations.
        dim: Width of the rows.
        margin: Score of a pair without distance.

    Shapes:
        - **input:** rows [n, dim] and [n, dim], leading dimensions broadcast; relation int64 [n] or one number.
        - **output:** scores [n].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        decoder = gf.nn.TransE(num_relations=3, dim=32)
        scores = decoder.score(torch.randn(8, 32), torch.randn(8, 32), torch.randint(3, (8,)))  # [8]
        ```
    """

    distance = True

    def __init__(self, num_relations: int, dim: int, margin: float = 9.0):
        super().__init__(torch.empty(num_relations, dim).uniform_(-1, 1) * math.sqrt(3 / max(dim, 1)), margin)

    def _query(self, rows: Tensor, weights: Tensor, sign: Tensor) -> Tensor:
        return rows + weights * sign


class RotatE(RelationDecoder):
    """Score a pair by ``margin - |h_src * r - h_dst|``: r turns each complex number of a row by a learnt angle.

    Sun et al., "RotatE: Knowledge Graph Embedding by Relational Rotation in Complex Space" (2019), with Euclidean
    distances, as in torch_geometric. Rows have the real parts first.

    Args:
        num_relations: Number of relations.
        dim: Width of the rows, even.
        margin: Score of a pair without distance.

    Shapes:
        - **input:** rows [n, dim] and [n, dim], leading dimensions broadcast; relation int64 [n] or one number.
        - **output:** scores [n].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        decoder = gf.nn.RotatE(num_relations=3, dim=32)
        scores = decoder.score(torch.randn(8, 32), torch.randn(8, 32), torch.randint(3, (8,)))  # [8]
        ```
    """

    distance = True

    def __init__(self, num_relations: int, dim: int, margin: float = 9.0):
        super().__init__(torch.empty(num_relations, dim // 2).uniform_(-math.pi, math.pi), margin)

    def _query(self, rows: Tensor, weights: Tensor, sign: Tensor) -> Tensor:
        return _times(rows, weights.cos(), weights.sin() * sign)


def _times(rows: Tensor, re: Tensor, im: Tensor) -> Tensor:
    """Return the products of complex rows, the real parts first, with complex numbers."""
    a, b = rows.chunk(2, 1)
    return torch.cat([a * re - b * im, a * im + b * re], 1)


#: Decoders with weights per relation, by name; each is made from (num_relations, dim).
RELATION_DECODERS = {"distmult": DistMult, "complex": ComplEx, "transe": TransE, "rotate": RotatE}
