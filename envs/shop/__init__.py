"""Customer service environment: requests of a shop's customers."""
