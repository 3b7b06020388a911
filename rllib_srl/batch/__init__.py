"""Prepare training batches from groups of episodes: advantages, loss weights, shards and layout, in NumPy."""
