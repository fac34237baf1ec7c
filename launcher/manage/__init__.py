"""Commands on runs that exist: status, logs, stop, resume and others, from any machine."""
