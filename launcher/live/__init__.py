"""What a run looks like while it goes on: ``board`` (values), ``table`` (lines of a terminal), ``keys`` (answers)."""
