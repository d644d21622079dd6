"""What a run measures and tells of itself while it trains."""
