"""Capture the training step of a named or a given model without training it."""
