"""From a captured graph, the budgets and the machine to the problem for the planner."""
