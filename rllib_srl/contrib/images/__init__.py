"""Class-incremental image classification with the replay buffer of the package."""
