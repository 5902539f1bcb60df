"""Recipes: what they may say, how they are read, and what they cost."""
