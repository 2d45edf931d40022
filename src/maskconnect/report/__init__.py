"""Output for people: the drawing of a wiring, plots, the page of a run."""
