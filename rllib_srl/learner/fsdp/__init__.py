"""FSDP2 for the learners: sharding of models, sharded state and its files."""
