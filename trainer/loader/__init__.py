"""Seeds → batches: seed order, split over ranks, caching, prefetch."""
