"""``ClusterConfig`` and facts of the nodes → ``LaunchPlan``, a value: every command, port and file of a run."""
