"""Deployment: a checkpoint becomes a file that runs elsewhere, and a file of any kind becomes a callable."""
