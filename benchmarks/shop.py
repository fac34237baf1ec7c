"""Writes the tables of a small shop, for link prediction: products of skewed popularity, customers with preferences.

python benchmarks/shop.py FOLDER; then `gnnfleet init localhost --dataset FOLDER` drafts the recommender.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

CATEGORIES = ("garden", "kitchen", "books", "toys", "sports", "music", "office", "pets")


def make_shop(folder: Path, customers: int = 3000, products: int = 400, purchases: int = 24_000, seed: int = 0) -> None:
    """Write customers.csv, products.csv and purchases.csv.

    A purchase is of a category in proportion to the customer's preference (Dirichlet, 0.22) and the popularity of the
    category's products, and of a product in proportion to its popularity (rank to the power of -0.65).
    """
    rng = np.random.default_rng(seed)
    category = rng.integers(len(CATEGORIES), size=products)
    price, rating = np.exp(rng.normal(3, 0.8, products)), rng.uniform(1, 5, products)
    popular = rng.permutation(np.arange(1, products + 1) ** -0.65)
    age, region = rng.integers(18, 80, customers), rng.integers(5, size=customers)
    preference = rng.dirichlet(np.full(len(CATEGORIES), 0.22), customers)
    active = rng.lognormal(0, 0.7, customers)
    who = rng.choice(customers, purchases, p=active / active.sum())
    chance = preference[:, category] * popular
    chance = np.cumsum(chance / chance.sum(1, keepdims=True), 1)
    draws = zip(who, rng.random(purchases), strict=True)
    what = [int(np.searchsorted(chance[k], draw * chance[k, -1], side="right")) for k, draw in draws]
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "customers.csv", "customer_id,age,region", (f"c{k},{age[k]},r{region[k]}" for k in range(customers))
    )
    rows = (f"p{k},{price[k]:.2f},{rating[k]:.2f},{CATEGORIES[category[k]]}" for k in range(products))
    _write(folder / "products.csv", "product_id,price,rating,category", rows)
    _write(folder / "purchases.csv", "customer_id,product_id", (f"c{a},p{b}" for a, b in zip(who, what, strict=True)))


def _write(path: Path, header: str, rows: Iterable[str]) -> None:
    path.write_text("\n".join([header, *rows]) + "\n")


if __name__ == "__main__":
    make_shop(Path(sys.argv[1]))
