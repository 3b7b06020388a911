"""Commands about learning one task after another: the stream protocol, and health before and after training."""
