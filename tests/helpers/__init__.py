"""Helpers that the tests share. Nothing is imported here: `fresh` is loaded where no module of ours may be."""
