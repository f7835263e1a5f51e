"""Questions that the paper leaves open: each a module with its measure, its figure and its finding."""
