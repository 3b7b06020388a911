"""Selection of items and groups to draw, and of items to evict: candidates, rules, domain shares, eviction."""
