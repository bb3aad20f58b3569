"""What training a config means, in closed formulas: memory, time, cost, and what to do about it. No jax in it."""
