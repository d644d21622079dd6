"""Memory counted in a step without data."""
