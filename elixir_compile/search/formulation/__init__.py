"""A problem as a mixed-integer program: columns, constraints, the relaxed optimum with its bound, and solutions."""
