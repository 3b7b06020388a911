"""Compute the policy loss from parts chosen by name: pure torch functions in fp32 log space.

    ratio      = level(logp - anchor_logp)                         `policy`       token, sequence, geometric
    surrogate  = rule(ratio, A)                                                   symmetric, higher, dual, ...
    correction = rule(prox_logp - behaviour_logp)                                 none, tis, mis, ...
    loss       = sum_N scale * (correction * surrogate + kl_coeff * kl - entropy_coeff * entropy)
                                                                   `kl`           k1, k2, k3, k3_k2

                 anchor_logp
    decoupled    prox_logp           prox = the learner at the start of the update
    bypass       behaviour_logp      behaviour = the engine that wrote the token
    reused       behaviour_logp

`scale` is fixed before any sharding (`batch/shard.py`), so any number of learners and any micro-batches give the
same gradient. `settings` holds every setting and named combinations; docs/losses.md lists sources and tests.

Source: Schulman et al. 2017, arXiv 1707.06347 eq. 7; each file lists the sources of its part.
"""
