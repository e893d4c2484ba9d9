"""A Ray cluster: how commands reach its nodes, and what travels there."""
