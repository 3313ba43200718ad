"""How the ranks that train one model agree on plans, graphs and settings before they act."""
