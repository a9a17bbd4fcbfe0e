"""Every published figure comes from a command here."""
