"""Many runs: grids of them, and what they show together."""
