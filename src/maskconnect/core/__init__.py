"""Section 3 of the paper: masks, draws, aggregation, and the stack that applies them to any modules."""
