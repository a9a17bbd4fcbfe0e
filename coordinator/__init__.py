"""The coordinator: it owns the committed tokens and alone accepts and rejects draft tokens. It never imports torch."""
