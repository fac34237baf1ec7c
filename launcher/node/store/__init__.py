"""A partition folder in an object store: fetches it into a node's work folder, and uploads it."""
