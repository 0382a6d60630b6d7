"""Policy strings, budgets, and validation of user input."""
