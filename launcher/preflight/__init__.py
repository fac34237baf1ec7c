"""Hosts → findings for the user and facts for the plan."""
