"""Builds ``report.html``, one page with charts of a run."""
