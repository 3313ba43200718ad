"""Captured graphs: their ops, capture to the values of `ir`, and the programs that obey a plan."""
