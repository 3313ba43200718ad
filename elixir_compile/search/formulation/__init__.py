"""The search as a mixed-integer program: its variables, rows, bound and rounding."""
