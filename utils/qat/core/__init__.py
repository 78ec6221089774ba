"""Parts that every command needs and that know nothing of networks."""
