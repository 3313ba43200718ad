"""Joint plans: several graphs under a shared budget, or ranks with different graphs."""
