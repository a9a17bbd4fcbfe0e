"""The draft service: a tree of draft tokens below the committed tokens."""
