"""The cost of learning connectivity: training steps compared with those of plain networks."""
