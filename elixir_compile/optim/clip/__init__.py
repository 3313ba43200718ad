"""Gradients before an update: their norms, overflow and clipping, and guards against changes by user code."""
