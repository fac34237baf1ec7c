"""``report.html``: one page with charts for one run."""
