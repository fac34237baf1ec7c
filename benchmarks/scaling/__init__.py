"""How work grows with hosts, measured on one machine, and what real hosts would make of it."""
