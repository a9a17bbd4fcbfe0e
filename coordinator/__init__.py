"""The coordinator: the only truth about what is committed, and the only one who decides. It never imports torch."""
