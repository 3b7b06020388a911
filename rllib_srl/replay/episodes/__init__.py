"""RLlib episodes in the memory: segments of episodes as items, and the buffer class that RLlib's DQN uses."""
