"""Transfer weights from learners to engines, verified."""
