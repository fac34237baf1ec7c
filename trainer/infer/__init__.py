"""Predictions and embeddings of all nodes with a trained model."""
