"""Export formats, one module each. Every module defines FORMAT, a format.Format."""
