"""What people look at: the drawing of a wiring, plots, the page of a run."""
