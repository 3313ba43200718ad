"""Several ranks: who has which part, how rows travel, and short messages over gloo."""
