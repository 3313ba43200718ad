"""Optimizer state: created, moved between device, host and disk, and loaded from state dicts."""
