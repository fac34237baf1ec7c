"""Files of a plan → in place on the nodes; and logs and results back."""
