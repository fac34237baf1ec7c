"""cluster.yml, flags and files of other launchers → ``ClusterConfig``."""
