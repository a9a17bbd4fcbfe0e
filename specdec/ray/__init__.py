"""The services as actors of a Ray cluster: Ray places and restarts them, gRPC carries everything else."""
