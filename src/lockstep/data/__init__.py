"""What a step reads: sample order, loading, embedded corpora."""
