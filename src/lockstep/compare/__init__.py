"""One recipe under several layouts, as a scaling table."""
