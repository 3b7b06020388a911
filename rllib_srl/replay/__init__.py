"""The memory: which prompts to play again and which groups to train on again."""
