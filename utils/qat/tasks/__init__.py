"""Tasks of networks, one module each. Every module defines TASK, a config.tasks.Task."""
