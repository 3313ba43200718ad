"""Training on several ranks: the shard of each rank, the collectives on shards, and short messages over gloo."""
