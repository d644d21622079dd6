"""The chapters of a page."""
