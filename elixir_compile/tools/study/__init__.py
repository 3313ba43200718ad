"""Studies and observed runs as values."""
