"""Keep evaluation questions out of what a run trains on: the setting `contamination`.

`audit`   which training questions repeat which evaluation questions, as a JSON file
`gate`    the comparison at the start of a run, and what follows from it
"""
