"""Selection of items and groups to draw, and of items to evict: rules, quotas of domains, a filter, draws, eviction."""
