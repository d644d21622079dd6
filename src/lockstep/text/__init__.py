"""Numbers, columns and small charts as people read them."""
