"""Commands on existing runs, from any machine: status, logs, follow, stop, collect, resume, attach, profile, report."""
