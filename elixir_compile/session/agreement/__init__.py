"""How the ranks of one model agree on plans, graphs and settings before they act."""
