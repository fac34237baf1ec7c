"""Opens partition folders: manifest, memory-mapped topology and attributes, row cache."""
