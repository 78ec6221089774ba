"""Analysis: each part of a model is measured in INT8 and in float."""
