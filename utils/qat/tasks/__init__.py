"""A file for each task of a network. It has TASK, a config.tasks.Task."""
