"""Reads cluster.yml, command-line flags and files of other launchers into a ``ClusterConfig``."""
