"""How good a model is, and how alike two models are."""
