"""Ship: from a trained checkpoint to the file to deploy, as a plan of the other commands."""
