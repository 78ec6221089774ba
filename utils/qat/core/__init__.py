"""Parts of every command that do not depend on networks."""
