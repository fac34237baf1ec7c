"""Sources of graphs: files, tables, datasets of OGB and torch_geometric, and generators, read as ``Dataset``."""
