"""Section 3 of the paper: masks, draws, aggregation, and the stack that runs any modules through them."""
