"""The checks of `srl doctor`: packages, output directory, settings, model, environments, and a short real run."""
