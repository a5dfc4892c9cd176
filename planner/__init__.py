"""What to do: the legal layouts, the integer program, the plan, its emission and its execution."""
