"""The live page in a browser without a window, as a person would use it."""
