"""The benchmark of the engine's steps, in one process and without services: `specdec bench engine`."""
