"""What `srl serve` and `srl versions` run: a gateway before vLLM's own server, and training in the background."""
