"""A file for each kind of file that a checkpoint is exported to. It has FORMAT, a format.Format."""
