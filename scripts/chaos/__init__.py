"""Scripts that end processes at seeded moments and check what is left."""
