"""One module for each proof."""
