"""Programming environments: code to write, or Python as a tool; the code runs in the sandbox."""
