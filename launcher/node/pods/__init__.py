"""Programs in the pods of a run that ``gnnfleet export --to kubernetes`` has exported."""
