"""Planners and improvements that need no solver: greedy, rules, enumeration, streaming, transfers."""
