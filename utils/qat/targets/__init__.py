"""Engines with their own placement of Q/DQ, one module each. Every module defines TARGET, a target.Target."""
