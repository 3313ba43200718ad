"""The training step of a model by name or of one at hand, captured without training it."""
