"""Datasets: reads or generates a graph with its attributes and splits."""

from __future__ import annotations

from trainer.data.dataset import Dataset
from trainer.data.load import dataset_fingerprint, load_dataset

__all__ = ["Dataset", "dataset_fingerprint", "load_dataset"]
