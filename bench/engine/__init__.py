"""What the engine's steps cost, in one process and without services: `specdec bench engine`."""
