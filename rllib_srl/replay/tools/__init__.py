"""Commands on the memory of a run that do not need the run: describing items, and removing them."""
