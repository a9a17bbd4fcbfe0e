"""How much to speculate: plans, what they measured, and the choice among them. Pure: standard library only."""
