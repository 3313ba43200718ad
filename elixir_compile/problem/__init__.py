"""From a captured graph, the budgets and the machine to the question that the planner answers."""
