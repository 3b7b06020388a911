"""Diversity of items and episodes: embeddings, nearest neighbours, measures."""
