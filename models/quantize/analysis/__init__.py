"""Analysis: the cost of INT8 in each part of a model."""
