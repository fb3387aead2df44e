"""Programs that are equivalent to others and easier to solve."""
