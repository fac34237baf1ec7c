"""Carries a plan out: launches, monitors and ends a run."""
