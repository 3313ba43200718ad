"""Plans made together: graphs that share one budget, ranks whose graphs differ, and plans corrected by a run."""
