"""Builds a ``LaunchPlan`` (every command, port and file of a run) from the config and the facts about the nodes."""
