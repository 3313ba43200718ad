"""Who trains how many rows and keeps how much of the training state, among ranks that differ."""
