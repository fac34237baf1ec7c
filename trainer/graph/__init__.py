"""A graph opened for one process: its parts, the hosts of the others, caches, and the seeds of each rank."""
