"""Transfer weights from learners to engines: verified sync and its transports."""
