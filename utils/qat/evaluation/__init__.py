"""Score models, and compare them."""
