"""Choose the prompts to play: fresh ones of environments and streams, and revisits from the memory."""
