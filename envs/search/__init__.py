"""Retrieval environments: search a corpus before answering."""
