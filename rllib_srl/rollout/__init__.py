"""Rollout: play prompts to episodes and collect the episodes of a prompt in a group.

    Player(engine, envs, ...) -> episodes in order of completion -> settle -> to_group -> Group

`rollouts`      all runners as one, `ahead` with `max_lag`; `runner_group` the calls to them; `batches` what they return
`env_runner`    the EnvRunner with an engine, and the groups that it plays
`player`        the event loop
`episodes`      an episode from its first token to its place in a group; `conversations` of an agent
`env_calls`     the threads that environments run in, and rewards that depend on the whole group
`replies`       validation of an environment's replies
`transcript`    text <-> tokens; `control_tokens`
"""
