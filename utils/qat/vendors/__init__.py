"""A room for each vendor: all that differs between engines. Its __init__.py has VENDOR, the facts, and config/tables.py has its name."""
