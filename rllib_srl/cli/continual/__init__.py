"""Commands about learning one task after another."""
