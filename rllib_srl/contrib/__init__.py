"""Parts that few people use. They are tested like the rest, but their interfaces may change."""
