"""A graph opened for one process: its parts, the hosts of other parts, caches, and the seeds of each rank."""
