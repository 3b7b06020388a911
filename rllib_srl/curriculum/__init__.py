"""What is played: fresh prompts of environments and streams, beside revisits from the memory."""
