"""What is inside a model: numbers, not opinions; data is returned, and drawn elsewhere."""
