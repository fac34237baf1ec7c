"""A run's report as one HTML file: ``RunRecord`` (read from its folder) → ``ReportPage`` (typed sections) → text."""
