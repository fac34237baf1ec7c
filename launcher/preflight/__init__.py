"""Checks all nodes before a launch: findings for the user, facts for the plan."""
