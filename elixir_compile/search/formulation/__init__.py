"""A problem as a mixed-integer program: columns, rows, the relaxed optimum with its bound, and integral solutions."""
