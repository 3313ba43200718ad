"""Optimizer state on disk; nothing else of the optimizer knows its files."""
