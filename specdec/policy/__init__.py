"""How much to speculate: plans, their measurements, and the choice among them. Pure: standard library only."""
