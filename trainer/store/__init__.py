"""Opens partition folders: reads the manifest, memory-maps topology and attributes. Also stores the row cache."""
