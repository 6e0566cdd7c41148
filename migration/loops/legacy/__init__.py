"""Loops that move models by hand, in the shapes that such loops really have."""
