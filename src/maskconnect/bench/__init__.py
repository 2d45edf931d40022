"""What learning connectivity costs: training steps beside those of plain networks."""
