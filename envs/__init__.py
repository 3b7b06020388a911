"""Text worlds: each file one `gymnasium.Env`, text in, text out, playable without rllib_srl."""
