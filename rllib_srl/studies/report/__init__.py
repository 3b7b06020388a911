"""Writes the report of a study as HTML or Markdown."""
