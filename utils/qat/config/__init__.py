"""Settings of the commands: dataclasses that check themselves, and the options that they are typed as."""
