"""Planners without a solver (greedy, rules, enumeration), and the choice of streamed updates and transfer times."""
