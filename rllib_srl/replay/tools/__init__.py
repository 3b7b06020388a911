"""Tools that work on a memory from outside a run: export, import, explanation, verification."""
