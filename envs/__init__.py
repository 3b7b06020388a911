"""Text environments: each file is one `gymnasium.Env` with text observations and actions, usable without rllib_srl."""
