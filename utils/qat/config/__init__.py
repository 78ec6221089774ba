"""Settings of the commands: dataclasses that validate themselves, and their command-line options."""
