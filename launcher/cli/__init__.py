"""Command-line words → calls."""
