"""How fast a file is."""
