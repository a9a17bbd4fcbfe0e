"""The draft service: a tree of guesses below the committed tokens."""
