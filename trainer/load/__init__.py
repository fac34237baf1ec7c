"""From seeds to batches: order, split over ranks, prefetch."""
