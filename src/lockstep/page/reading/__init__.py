"""From the event log to what a page needs."""
