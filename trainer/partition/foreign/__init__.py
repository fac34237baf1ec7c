"""Partition folders of other programs: torch_geometric.distributed, GraphLearn-for-PyTorch (GLT) and DGL."""
