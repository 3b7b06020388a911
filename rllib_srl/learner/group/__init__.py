"""The group of learners: calls to all of them, and a new group in place of a lost one."""
