"""Models from folders: files and their checks, supported architectures, devices, memory."""
