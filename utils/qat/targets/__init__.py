"""A file for each engine that a placement of Q/DQ can be made for. It has TARGET, a target.Target."""
