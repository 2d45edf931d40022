"""Many runs: grids of runs, and comparisons of their results."""
