"""Host lists and configs of other launchers, read as ours.

``FILE + Flags → recognise (by content) → Foreign (a cluster.yml as a tree) → ClusterConfig``. The values of the tree
know where they stood in the foreign file, so that mistakes are answered with its lines.
"""
